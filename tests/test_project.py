"""Rules for every tracked file: no place of one machine, pinned locks, small files, telling names, live links."""

import re
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ("requirements.lock", "requirements-test.lock")
MAX_BYTES = 1_000_000
# Fixtures that may be larger, by path, each with its reason.
LARGE_FIXTURES: dict[str, str] = {
    "tests/oracles/cases/e_midtrain/start.npz": "weights and Adam moments that a replay of the reference starts from",
}
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "tools", "stuff"}

# The patterns are written with classes and groups so that this file does not match them itself.
PLACES = {
    "registry host": re.compile(r"pypi[.]org|python[h]osted|npmjs[.](org|com)|anaconda[.](org|com)|download[.]pytorch"),
    "path of one machine": re.compile(r"(?<![\w.~$}-])/(work|root|opt|home|tmp)/[\w.]"),
    "index or mirror option": re.compile(r"--(extra-)?index-ur[l]|--find-link[s]|--trusted-hos[t]"),
}
PIN = re.compile(r"^([a-z0-9][a-z0-9._-]*)==([^ ;\\]+)", re.M)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Tracked files that exist in the work tree, relative to the root."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return [name for name in git("ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]


def read_text(name: str) -> str | None:
    """The text of a tracked file, None when it is binary."""
    data = (ROOT / name).read_bytes()
    return None if b"\0" in data[:8192] else data.decode(errors="replace")


def test_no_tracked_file_names_a_place_of_one_machine(tracked: list[str]):
    found = [
        f"{name}:{number}: {what}: {line.strip()[:80]}"
        for name in tracked
        for number, line in enumerate((read_text(name) or "").splitlines(), 1)
        for what, pattern in PLACES.items()
        if pattern.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("see https://py" + "pi.org/simple", "registry host"),
        ("cp x " + "/work" + "/main", "path of one machine"),
        ('PATH="' + "/root" + '/.x"', "path of one machine"),
        ("--index" + "-url x", "index or mirror option"),
    ],
)
def test_the_patterns_find_such_lines(line: str, what: str):
    assert [name for name, pattern in PLACES.items() if pattern.search(line)] == [what]


def test_files_are_small(tracked: list[str]):
    sizes = {name: (ROOT / name).stat().st_size for name in tracked}
    assert {n: size for n, size in sizes.items() if size > MAX_BYTES and n not in LARGE_FIXTURES} == {}
    assert set(LARGE_FIXTURES) <= set(tracked), "LARGE_FIXTURES names files that are gone"


def test_names_tell_what_a_file_is_for(tracked: list[str]):
    vague = [name for name in tracked if VAGUE_NAMES & {Path(part).stem for part in Path(name).parts}]
    assert vague == []


def test_programs_are_executable(tracked: list[str]):
    modes = {line.split("\t", 1)[1]: line.split()[0] for line in git("ls-files", "-s").splitlines()}
    programs = [name for name in tracked if (ROOT / name).read_bytes()[:2] == b"#!"]
    assert {".ci/run", "scripts/quickstart.sh", "scripts/test.sh"} <= set(programs)
    assert [name for name in programs if modes[name] != "100755"] == []


def anchors(page: Path) -> set[str]:
    """What `#...` may name on a page: its headings, in the letters that repository browsers make of them."""
    text = re.sub(r"(?ms)^(`{3,}).*?^\1", "", page.read_text())
    headings = re.findall(r"(?m)^#+ +(.*)$", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere(tracked: list[str]):
    pages = [name for name in tracked if name.endswith(".md")]
    assert "README.md" in pages
    dead, with_anchor = [], 0
    for page in pages:
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            with_anchor += bool(anchor)
            if not file.exists() or (anchor and anchor not in anchors(file)):
                dead.append(f"{page}: {target}")
    assert dead == []
    assert with_anchor > 3


def test_the_site_has_a_place_for_every_page(tracked: list[str]):
    listed = re.findall(r"(?m)^ +- (?:[^:\n]+: )?([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1])
    pages = [name.removeprefix("docs/") for name in tracked if re.fullmatch(r"docs/.*\.md", name)]
    assert sorted(listed) == sorted(pages), "each page of docs/ stands once below nav: in mkdocs.yml"


# Locks and package


def pins(lock: str) -> dict[str, set[str]]:
    """Name -> pinned versions (several when Python versions differ)."""
    found: dict[str, set[str]] = {}
    for name, version in PIN.findall((ROOT / lock).read_text()):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_lock_holds_only_versions_and_hashes(lock: str):
    text = (ROOT / lock).read_text()
    assert not re.search(r"://|^-|file:| @ ", text, re.M)
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.M)[1:]
    assert len(entries) > 50
    for entry in entries:
        assert PIN.match(entry), entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]
    assert not {"torch", "tensorflow", "transformers"} & set(pins(lock))


def test_the_test_lock_extends_the_other_one():
    """So that one environment serves both scripts, whichever runs first."""
    core, test = (pins(lock) for lock in LOCKS)
    assert {name: test.get(name) for name in core} == core


def test_locks_hold_every_declared_dependency():
    """`scripts/lock.sh` has been run after the last change of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {LOCKS[0]: project["dependencies"], LOCKS[1]: project["optional-dependencies"]["test"]}
    for lock, requirements in declared.items():
        for requirement in requirements:
            name, lowest = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
            versions = pins(lock).get(name.lower(), set())
            assert versions, f"{name} is not in {lock}: run scripts/lock.sh"
            too_old = [version for version in versions if _numbers(version) < _numbers(lowest)]
            assert not too_old, f"{lock} pins {name} {too_old}, the project asks for >= {lowest}: run scripts/lock.sh"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def test_wheel_holds_only_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from flit_core import buildapi

    import maxtext

    monkeypatch.chdir(ROOT)
    wheel = zipfile.ZipFile(tmp_path / buildapi.build_wheel(str(tmp_path)))
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert tops == {"maxtext", f"maxtext-{maxtext.__version__}.dist-info"}
    assert "maxtext/config/schema.py" in wheel.namelist()
