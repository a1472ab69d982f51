"""`mainspring completion`: scripts that know every command and flag, tried in the shells that are here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mainspring.checkpoint.catalog import CATALOGUE
from mainspring.cli import bench, completion, main, program

BASH_TRY = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 ))
_mainspring
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("scripts"), completion.commands()
    for shell, make in completion.SCRIPTS.items():
        (folder / shell).write_text(make(found))
    return {shell: folder / shell for shell in completion.SCRIPTS}


def answer(command: list[str], cwd: Path) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=True, timeout=20)
    assert done.stderr == ""
    return {line.split("\t")[0] for line in done.stdout.splitlines() if line}


TRIED = [
    ("mainspring gen", {"generate"}),
    ("mainspring ", set(program.COMMANDS)),
    ("mainspring bench ", set(bench.BENCHES)),
    ("mainspring bench latency --batch", {"--batch-size"}),
    ("mainspring serve --uds", {"--uds"}),
    ("mainspring bench serve --uds", set()),
    ("mainspring chat --kernels n", {"native", "numpy"}),
    ("mainspring generate --model smol", {"smollm2-135m"}),
    ("mainspring serve smol", {"smollm2-135m"}),
    ("mainspring serve --config fl", {"flags.yaml"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(("typed", "expected"), TRIED)
def test_bash(scripts, tmp_path, typed: str, expected: set[str]):
    (tmp_path / "flags.yaml").touch()
    command = ["bash", "-c", BASH_TRY, "try", str(scripts["bash"]), *typed.split(" ")]
    assert answer(command, tmp_path) == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
@pytest.mark.parametrize(("typed", "expected"), TRIED)
def test_fish(scripts, tmp_path, typed: str, expected: set[str]):
    (tmp_path / "flags.yaml").touch()
    command = ["fish", "-c", f"source {scripts['fish']}; complete -C '{typed}'"]
    assert answer(command, tmp_path) - {"flags.yaml"} == expected - {"flags.yaml"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh(scripts, tmp_path):
    """Its syntax; completion there needs a terminal."""
    assert answer(["zsh", "-n", str(scripts["zsh"])], tmp_path) == set()


@pytest.mark.parametrize("shell", completion.SCRIPTS)
def test_every_command_flag_and_model_is_in_the_script(scripts, shell: str):
    text = scripts[shell].read_text()
    for name, command in completion.commands().items():
        for flag in command.flags:
            assert (flag.lstrip("-") if shell == "fish" else flag) in text, (name, flag)
    assert all(name in text for name in [*program.COMMANDS, *bench.BENCHES, *CATALOGUE])


def test_what_is_no_shell(capsys: pytest.CaptureFixture[str]):
    assert main(["completion", "bsh"]) == 2
    assert capsys.readouterr().err == "mainspring: unknown shell 'bsh'; did you mean bash?\n"
    assert main(["completion"]) == 2
    assert capsys.readouterr().err == "mainspring: give one of bash, zsh, fish\n"
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out.startswith("# mainspring's words for bash")
