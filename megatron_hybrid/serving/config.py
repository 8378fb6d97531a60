"""ServingConfig: the settings of the server."""

from dataclasses import dataclass
from typing import Annotated

from megatron_hybrid.serving.parsers.choice import Style, style_of
from megatron_hybrid.utils.validation import Range, check_fields


@dataclass(frozen=True)
class ServingConfig:
    """Settings of the server.

    Raises:
        ValueError: a field has an illegal value; the message names it and the limit.
    """

    model_name: str
    """Offer the model under this name. The default is the name of its folder."""

    description: str = ""
    """Description of the model, shown at `/v1/models` and on the page."""

    adapters: tuple[str, ...] = ()
    """Serve the low-rank adapter of a folder in PEFT's format under a name of its own, as
    NAME=FOLDER; requests choose it as their model. The option may be given several times. It needs
    --max-adapters."""

    api_keys: tuple[str, ...] = ()
    """Answer only clients that send this key. The option may be given several times. More keys are
    read from the environment variable MEGATRON_HYBRID_API_KEYS, separated by commas."""

    admin_keys: tuple[str, ...] = ()
    """Let only this key open the routes of the operator, such as /cache/reset. By default a single
    API key opens them; with several API keys they are closed. The option may be given several
    times; more keys are read from MEGATRON_HYBRID_ADMIN_KEYS, separated by commas."""

    shows_prompts: bool = False
    """Show texts of prompts on the operator's page. By default the page shows only their lengths.
    """

    tool_call_parser: str = ""
    """Read calls of functions in answers by this parser. none leaves them in the text. By default
    the parser follows from the chat template."""

    reasoning_parser: str = ""
    """Read reasoning in answers by this parser. none leaves it in the text. By default the parser
    follows from the chat template."""

    keeps_changing_lines: bool = False
    """Keep lines of the system's message in place that change in every request: a billing line of
    Claude Code, and lines with nothing but a time of day or an id of the request. By default the
    billing line is left out and the others move to the end of the newest message, so that prefixes
    are reused; the header X-Request-Changes says so."""

    lowers_max_tokens: bool = False
    """Lower a chat's limit of tokens to what the context has left after the prompt. By default such
    a request is refused with 400."""

    logs_prompts: bool = False
    """Log the text of each chat's prompt, as the model reads it."""

    takes_weights: bool = False
    """Let a trainer pause this server and send it new weights, by the operator's routes /pause,
    /sleep, /update_weights and others. Anyone who may call these routes can change the model. By
    default the server does not have these routes."""

    shares_cache: bool = False
    """Let all API keys share cached prefixes. By default each of several keys has cached prefixes
    of its own."""

    allowed_hosts: tuple[str, ...] = ()
    """Without API keys, also answer requests that were sent to this host name. Other such requests
    must have been sent to an IP address, to localhost, or to the name of this machine. The option
    may be given several times."""

    cors_origins: tuple[str, ...] = ()
    """Let web pages of this site, such as https://chat.example, call the server; * allows all
    sites. The option may be given several times. By default only the server's own page may call
    it."""

    root_path: str = ""
    """Name the path, such as /llm, under which a proxy offers this server."""

    max_body_bytes: Annotated[int, Range(ge=1, le=2**63 - 1)] = 16 << 20
    """Refuse with 413 a request whose body is larger than this."""

    max_waiting: int = 256
    """Let at most N requests wait in addition to those that run; further requests are refused with
    503. Each sample of each prompt counts as a request."""

    max_requests_per_key: Annotated[int, Range(ge=1)] | None = None
    """Let an API key have at most N unanswered requests; further requests are refused with 429. By
    default there is no limit."""

    queue_seconds: Annotated[float, Range(ge=0)] | None = None
    """Refuse with 503 a request that has waited this long. A request of several prompts waits until
    its first prompt starts. By default there is no limit."""

    request_seconds: Annotated[float, Range(gt=0)] | None = None
    """End with 504 a request that has taken this long, waiting included. By default there is no
    limit."""

    drain_seconds: Annotated[float, Range(ge=0)] = 30.0
    """Give running requests this much time to end after SIGTERM or Ctrl-C."""

    def __post_init__(self) -> None:
        check_fields(self)
        for each in self.adapters:
            name, _, folder = each.partition("=")
            if name in ("", self.model_name) or not folder:
                raise ValueError(
                    f"adapters has {each!r}; write each as NAME=FOLDER, with another name than "
                    f"that of the model, {self.model_name!r}."
                )
        if self.root_path and self.root_path[0] != "/":
            raise ValueError(f"root_path is {self.root_path!r}; it must begin with a /.")
        for origin in self.cors_origins:
            if origin != "*" and "://" not in origin:
                raise ValueError(
                    f"{origin!r} is no origin of pages (--cors-origin): give a scheme and a name, "
                    "such as https://chat.example, or *"
                )

    def style_of(self, template: str | None) -> Style:
        """Return how a model with this chat template answers."""
        return style_of(template, self.tool_call_parser, self.reasoning_parser)
