"""Health check of the images: it asks the program that is process 1 at the port where its options,
or its environment, let it listen. Status 0: it is ready, or listens nowhere."""

import argparse
import http.client
import os
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SECONDS = 10
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def connection(
    words: Sequence[str], environ: Mapping[str, str]
) -> http.client.HTTPConnection | None:
    """Return the way to a program, which goes over no proxy. None: it listens nowhere.

    words: its command line: of `megatron-hybrid serve`, or a frontend or worker of Dynamo.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if any(word.startswith("megatron_hybrid.dynamo") for word in words):
        host, port = environ.get("DYN_SYSTEM_HOST"), environ.get("DYN_SYSTEM_PORT") or -1
        parser.set_defaults(host=host, port=port, cert=None, uds=None)
    elif "dynamo.frontend" in words:
        parser.add_argument("--http-host", dest="host", default=environ.get("DYN_HTTP_HOST"))
        parser.add_argument("--http-port", dest="port", default=environ.get("DYN_HTTP_PORT"))
        cert = environ.get("DYN_TLS_CERT_PATH")
        parser.add_argument("--tls-cert-path", dest="cert", default=cert)
        parser.set_defaults(uds=None)
    else:
        for name in ("host", "port", "uds"):
            parser.add_argument(f"--{name}")
        parser.add_argument("--ssl-certfile", dest="cert")
    # An init, such as tini, puts -- before the program.
    options, _ = parser.parse_known_args([word for word in words if word != "--"])
    host, port = options.host or "127.0.0.1", int(options.port or 8000)
    host = _ANYWHERE.get(host, host)
    if port < 0:
        return None
    if options.cert:  # the certificate is of another name than the host's
        context = ssl._create_unverified_context()
        return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=context)
    found = http.client.HTTPConnection(host, port, timeout=SECONDS)
    if options.uds:
        found.sock = socket.socket(socket.AF_UNIX)
        found.sock.settimeout(SECONDS)
        found.sock.connect(options.uds)
    return found


def main() -> int:
    words = Path("/proc/1/cmdline").read_text().split("\0")
    if (asked := connection(words, os.environ)) is None:
        return 0
    asked.request("GET", "/health")
    return 0 if asked.getresponse().status == 200 else 1


if __name__ == "__main__":
    sys.exit(main())
