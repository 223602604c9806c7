"""docs/fragmentation.md runs: every command on the page prints what stands there, and draws its picture."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from cli.main import main
from cli.output import Exit

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "fragmentation.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PICTURES = re.findall(r"\]\((fragmentation/[\w-]+\.svg)\)", PAGE)


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def same(shown: str, printed: str) -> bool:
    """`...` stands for one word that differs between machines."""
    words, found = shown.split(), printed.split()
    return len(words) == len(found) and all(word in ("...", other) for word, other in zip(words, found, strict=True))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for file in (DOCS / "fragmentation").glob("*.csv"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_prints_what_stands_there(block: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, _, expected = command.partition("\n")
        name, *words = shlex.split(line)
        assert name in ("cat", "laxity")
        if name == "cat":
            printed = (folder / words[0]).read_text()
        else:
            assert Exit.OK == main(words)
            printed = capsys.readouterr().out
        shown, found = lines_of(expected), lines_of(printed)
        assert [] == [pair for pair in zip(shown, found, strict=True) if not same(*pair)]


def test_the_pictures_are_those_that_the_page_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in BLOCKS:
        for line in re.findall(r"^\$ laxity (.*--picture .*)$", block.replace("\\\n", " "), re.MULTILINE):
            main(shlex.split(line))
    drawn = {f"fragmentation/{file.name}": file.read_text() for file in folder.glob("*.svg")}
    assert set(PICTURES) == set(drawn)
    assert drawn == {name: (DOCS / name).read_text(encoding="utf-8") for name in PICTURES}


def test_a_wrong_number_would_be_noticed() -> None:
    assert same("spread 12.50 ...", "spread 12.50 871")
    assert not same("spread 12.51 ...", "spread 12.50 871")
    assert len(BLOCKS) >= 3
