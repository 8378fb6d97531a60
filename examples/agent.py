"""An agent with two tools, over the server. It prints what each turn reused.

    megatron-hybrid serve --chat-template examples/agent.jinja
    python examples/agent.py                # in another terminal

The demo model was trained on stories, and does not call tools by itself. So
`tool_choice` names the function of each turn, and the model draws arguments
at random. Let a model that was trained for it choose: `megatron-hybrid serve
FOLDER`, with its own template, and `python examples/agent.py --auto`.

The history only grows, and each message of the model goes back as it came. So
each prompt begins with all of the one before. docs/guides/agents.md says what breaks
this.
"""

import argparse
import json
import operator
import urllib.request

AGES = {"king": 61, "queen": 58, "eldest": 30, "youngest": 19}
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SYSTEM = "You answer questions about a family. Look ages up, and calculate."
QUESTION = "How much older is the king than the youngest of his daughters?"
PLAN = ["look_up", "look_up", "calculate"]  # a call a turn, without --auto
MAX_TURNS = 8


def look_up(person: str) -> int:
    return AGES[person]


def calculate(expression: str) -> int:
    left, sign, right = expression.split()
    return SIGNS[sign](int(left), int(right))


def described(name: str, **properties: dict) -> dict:
    parameters = {"type": "object", "properties": properties}
    parameters |= {"required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


EXPRESSION = {"type": "string", "pattern": "^[1-9][0-9]? [-+*] [1-9][0-9]?$"}
FUNCTIONS = {"look_up": look_up, "calculate": calculate}
TOOLS = [
    described("look_up", person={"enum": list(AGES)}),
    described("calculate", expression=EXPRESSION),
]


def result_of(name: str, arguments: str) -> str:
    """What goes back to the model: a number, or what was wrong."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def ask(url: str, messages: list[dict], turn: int, chooses: bool) -> dict:
    body = {"messages": messages, "tools": TOOLS, "seed": turn, "max_tokens": 500}
    if not chooses and turn < len(PLAN):
        body["tool_choice"] = {"type": "function", "function": {"name": PLAN[turn]}}
    elif not chooses:
        body |= {"tool_choice": "none", "max_tokens": 12}  # a story has no end
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="An agent with two tools.")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="Call the server at this URL."
    )
    parser.add_argument("--auto", action="store_true", help="Let the model choose the tools.")
    options = parser.parse_args(arguments)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
    ]
    total = skipped = 0
    print("turn  prompt tokens  skipped  the model")
    for turn in range(MAX_TURNS):
        found = ask(options.url, messages, turn, options.auto)
        message, usage = found["choices"][0]["message"], found["usage"]
        prompt = usage["prompt_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        total, skipped = total + prompt, skipped + cached
        messages.append(message)
        calls = message.get("tool_calls") or []
        wanted = ", ".join(" ".join(each["function"].values()) for each in calls)
        said = " ".join((wanted or message["content"]).split())
        print(f"{turn + 1:4}  {prompt:13}  {cached:7}  {said[:46]}")
        if not calls:
            break
        for call in calls:
            result = {"tool_call_id": call["id"], "content": result_of(**call["function"])}
            messages.append({"role": "tool", **result})
    print(f"{skipped} of {total} prompt tokens were skipped, {skipped / total:.0%}")


if __name__ == "__main__":
    main()
