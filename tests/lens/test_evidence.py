"""Evidence files: private, sealed by a checksum, and checked before anything in them is used."""

from __future__ import annotations

import hashlib
import io
import os
import random
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.errors import StepError
from halfstep.lens.box.evidence import SEAL_BYTES, load_evidence

posix = pytest.mark.skipif(os.name != "posix", reason="modes and pipes of POSIX")


def loss_fn(model: nn.Module, given: dict[str, Any]) -> Tensor:
    loss: Tensor = (model(given["x"][0]) / given["by"]).square().mean()
    return loss


def bad_step(folder: Path) -> None:
    """Make one update, and a bad step that leaves its evidence in `folder`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hs.TrainStep(model, optimizer, loss_fn, policy=hs.Policy.of("mixed", dtype="bf16"), blackbox=folder)
    for by in (1.0, 0.0):
        step({"x": [torch.ones(2, 4)], "by": by})
    step.explain()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    bad_step(folder)
    return folder / "halfstep-blackbox-2.pt"


def sealed(path: Path, content: bytes) -> Path:
    path.write_bytes(content + b"\nsha256 %s\n" % hashlib.sha256(content).hexdigest().encode())
    return path


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


# ---------------------------------------------------------------------- modes


@posix
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
@pytest.mark.parametrize("there", [False, True])
def test_its_owner_alone_can_read_it(umask: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first byte: the modes are those at which files get their content."""
    folder = tmp_path / "given"
    if there:
        folder.mkdir(mode=0o755)
        (folder / "halfstep-blackbox-2.txt").write_text("of an earlier run")
        (folder / "halfstep-blackbox-2.part").write_text("of a run that was cut off")
        for file in folder.iterdir():
            file.chmod(0o644)
    modes: list[int] = []
    save: Callable[..., None] = torch.save

    def noted(content: object, to: Any) -> None:
        modes.append(os.fstat(to.fileno()).st_mode)
        save(content, to)

    monkeypatch.setattr(torch, "save", noted)
    before = os.umask(umask)
    try:
        bad_step(folder)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600]
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == {"halfstep-blackbox-2.pt": 0o600, "halfstep-blackbox-2.txt": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == (0o755 if there else 0o700)


@posix
def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for suffix in ("part", "txt", "pt"):
        (tmp_path / f"halfstep-blackbox-2.{suffix}").symlink_to(tmp_path / "mine")
    bad_step(tmp_path)
    assert (tmp_path / "mine").read_text() == "mine"
    assert load_evidence(tmp_path / "halfstep-blackbox-2.pt")["step"] == 2


# ---------------------------------------------------------------------- damage


def test_every_damage_is_found(file: Path, tmp_path: Path) -> None:
    """Changed, cut off, longer: at random places, and at each of the last."""
    whole, draw = file.read_bytes(), random.Random(0)
    places = [*(draw.randrange(len(whole)) for _ in range(200)), *range(len(whole) - SEAL_BYTES, len(whole))]
    damaged = [whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :] for at in places]
    damaged += [whole[:at] for at in places[:50]] + [whole + b"\n", b"", whole[-SEAL_BYTES:]]
    for content in damaged:
        (tmp_path / "f.pt").write_bytes(content)
        with pytest.raises(StepError, match="cannot read .*(damaged|cut off)"):
            load_evidence(tmp_path / "f.pt")
    assert load_evidence(file)["step"] == 2


def test_evidence_without_a_sum_is_refused_with_the_remedy(file: Path, tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(file.read_bytes()[:-SEAL_BYTES])
    with pytest.raises(StepError, match="written before evidence had one; .* let the bad step run again"):
        load_evidence(tmp_path / "f.pt")


# ---------------------------------------------------------------------- crafted contents, with the right sum


class Attack:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def endless() -> list[Any]:
    itself: list[Any] = []
    itself += [itself, itself]
    return itself


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(150):
        value = [value]
    return value


def wide() -> list[Any]:
    """Return a small file of 2**60 items."""
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    return value


def micro(content: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {**content, "window": [{**content["window"][0], **values}]}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another version": (lambda c: {**c, "halfstep_blackbox": 1}, "halfstep_blackbox: 1, expected"),
    "no dict": (lambda c: [c], "a list of 1, expected a dict"),
    "a missing key": (lambda c: {k: v for k, v in c.items() if k != "window"}, "'window' is missing"),
    "an unknown key": (lambda c: {**c, "windows": 1}, "'windows' is unknown; did you mean 'window'"),
    "a step as text": (lambda c: {**c, "step": "2"}, "step: '2', expected a whole number"),
    "a step of many digits": (lambda c: {**c, "step": 10**50}, "step: a number of 167 bits"),
    "a scale as text": (lambda c: {**c, "scale": "1"}, "scale: '1', expected"),
    "a policy as bytes": (lambda c: {**c, "policy": b"x"}, "policy: b'x', expected"),
    "no window": (lambda c: {**c, "window": []}, "window"),
    "a batch as text": (lambda c: micro(c, batch="text"), r"window\[0\].batch: 'text', expected a list"),
    "a deep batch": (lambda c: micro(c, batch=deep()), "its containers are deeper, or hold more"),
    "a batch in itself": (lambda c: micro(c, batch=endless()), "its containers are deeper, or hold more"),
    "a batch of 2**60 items": (lambda c: micro(c, batch=wide()), "its containers are deeper, or hold more"),
    "a dtype in a batch": (lambda c: micro(c, batch=[torch.float32]), r"batch\[0\]: .*expected plain containers"),
    "a seed as a number": (lambda c: micro(c, seed=1.0), "seed: 1.0, expected None or a tensor"),
    "a tensor without memory": (lambda c: micro(c, seed=torch.ones(2, device="meta")), "seed: .*expected"),
    "random of no device": (lambda c: micro(c, random={"../cpu": torch.ones(1)}), "the key '../cpu'"),
    "weights as text": (lambda c: {**c, "model": {"weight": "x"}}, "model.weight: 'x', expected a tensor"),
    "a tensor of 4 bytes and 4 TiB": (
        lambda c: micro(c, batch=[torch.ones(1).as_strided((1 << 40,), (0,))]),
        "holds tensors of 4194304 MiB in a file of 0",
    ),
    "signals as text": (lambda c: {**c, "signals": {"updates": "x", "weights": [], "inputs": []}}, "signals.updates"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_contents_are_named(what: str, file: Path, tmp_path: Path) -> None:
    wrong, message = WRONG[what]
    path = sealed(tmp_path / "f.pt", saved(wrong(load_evidence(file))))
    with pytest.raises(StepError, match=message):
        load_evidence(path)


def test_nothing_is_executed(file: Path, tmp_path: Path) -> None:
    for content in (Attack(tmp_path / "mark"), micro(load_evidence(file), batch=[Attack(tmp_path / "mark")])):
        with pytest.raises(StepError, match=r"it holds objects of .*mkdir, which torch\.load"):
            load_evidence(sealed(tmp_path / "f.pt", saved(content)))
    assert not (tmp_path / "mark").exists()


def test_a_compressed_file_is_not_unpacked(file: Path, tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(torch.zeros(1 << 20)))) as plain, zipfile.ZipFile(packed, "w", 8) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    with pytest.raises(StepError, match="its parts are compressed"):
        load_evidence(sealed(tmp_path / "f.pt", packed.getvalue()))


@posix
def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "n\0ne", tmp_path / "none"):
        with pytest.raises(StepError, match="cannot read"):
            load_evidence(path)
    with pytest.raises(StepError, match="cannot read"):
        load_evidence(3)  # type: ignore[arg-type]


def test_weights_of_another_kind_are_refused(file: Path, tmp_path: Path) -> None:
    content = load_evidence(file)
    task = hs.Task(
        name="t",
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        batches=lambda seed, step: (),
    )
    assert hs.lens.replay(file, task).op == "div"
    weights = {**content["model"], "0.bias": torch.ones(4, dtype=torch.complex64)}
    path = sealed(tmp_path / "f.pt", saved({**content, "model": weights}))
    with pytest.raises(StepError, match=r"0\.bias is torch.complex64 and torch.float32 in the model"):
        hs.lens.replay(path, task)
    path = sealed(tmp_path / "f.pt", saved({**content, "buffers": [["0", "weight", torch.ones(4, 4)]]}))
    with pytest.raises(StepError, match="'0.weight' is no buffer of the task's Sequential"):
        hs.lens.replay(path, task)
