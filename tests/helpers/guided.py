"""Answers to guides, byte by byte."""

from random import Random

from megatron_hybrid.text.guide import Guide, GuideCompiler

EOS = 256
COMPILER = GuideCompiler([*(bytes([byte]) for byte in range(256)), b""], EOS + 1)


def accepts(guide: Guide, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = COMPILER.matcher(guide, [EOS])
    for byte in text.encode(errors="surrogatepass"):
        if not matcher.allows(byte):
            return False
        matcher.add([byte])
    return matcher.allows(EOS)


def walk(guide: Guide, random: Random, likely: bytes, most: int = 200) -> str | None:
    """A random answer; None: it would be too long."""
    matcher, answer = COMPILER.matcher(guide, [EOS]), b""
    for _ in range(most):
        allowed = list(filter(matcher.allows, range(256)))
        some = [byte for byte in allowed if byte in likely]
        rest = [byte for byte in allowed if byte not in b" \n\t"]
        if matcher.allows(EOS) and (not rest or random.random() < 0.3):
            return answer.decode()
        pool = some if some and random.random() < 0.7 else rest or allowed
        answer += bytes([random.choice(pool)])
        matcher.add([answer[-1]])
    return None
