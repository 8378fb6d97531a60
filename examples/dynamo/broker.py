"""python examples/dynamo/broker.py tcp://127.0.0.1:5555 tcp://127.0.0.1:5556

Passes the events of Dynamo's workers on to its frontends. Without it each worker has event sockets
of Dynamo's that listen on all addresses of its machine. With it workers and frontends connect to
these two endpoints, and this program alone listens. All of them get

    DYN_ZMQ_BROKER_URL="xsub=tcp://127.0.0.1:5555 , xpub=tcp://127.0.0.1:5556"

Whoever reaches the endpoints reads the tokens of all prompts.
"""

import argparse
import signal

import zmq


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass events of Dynamo's workers on.")
    parser.add_argument("workers", metavar="XSUB", help="Listen here for workers.")
    parser.add_argument("frontends", metavar="XPUB", help="Listen here for frontends.")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    context = zmq.Context()
    sockets = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for socket, endpoint in zip(sockets, (options.workers, options.frontends)):
        socket.bind(endpoint)
    zmq.proxy(*sockets)


if __name__ == "__main__":
    main()
