"""The tuner: what it chooses, and what it keeps on disk. Times are made up: no GPU is needed."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from megabit_kernels.triton import candidates, products, table, tune, tuning
from megabit_kernels.triton.candidates import Card
from megabit_kernels.triton.config import Choice, Kernel, TileConfig
from megabit_kernels.triton.table import Key

HOPPER = Card("NVIDIA H100 80GB HBM3", 132, 90)
BLACKWELL = Card("NVIDIA B200", 148, 100)
KERNELS: tuple[Kernel, ...] = (
    "packed_gemm",
    "split_k",
    "int8_gemm",
    "input_gradient",
    "packed_input_gradient",
    "weight_gradient",
)
TILES = TileConfig(64, 128)
CPU = torch.device("cpu")


class Clock:
    """A timer whose calls take as long as the choices that they ran were said to."""

    def __init__(self, seconds: dict[Choice, float]) -> None:
        self.seconds = seconds
        self.ran: list[Choice] = []

    def run(self, choice: Choice) -> None:
        self.ran.append(choice)

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        return self.seconds[self.ran[-1]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own, which is where the user's tables are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tuning.table_of.cache_clear()
    return tmp_path / ".cache" / "megabit" / "tuned"


def test_the_fastest_candidate_is_chosen() -> None:
    clock = Clock({TILES: 3e-6, TileConfig(32, 64): 2e-6, "cublas": 5e-6})
    assert tuning.tune(tuple(clock.seconds), clock.run, clock) == TileConfig(32, 64)


def test_cublas_is_chosen_where_it_is_faster() -> None:
    clock = Clock({TILES: 3e-6, "cublas": 1e-6})
    assert tuning.tune(tuple(clock.seconds), clock.run, clock) == "cublas"


def test_of_equals_the_first_is_chosen() -> None:
    clock = Clock({TILES: 3e-6, TileConfig(32, 64): 3e-6, "cublas": 3e-6})
    assert tuning.tune(tuple(clock.seconds), clock.run, clock) == TILES


def test_a_candidate_without_room_on_the_card_is_passed_over() -> None:
    clock = Clock({"cublas": 4e-6})

    def run(choice: Choice) -> None:
        if choice != "cublas":
            raise OutOfResources(300_000, 232_448, "shared memory")
        clock.run(choice)

    assert tuning.tune((TILES, "cublas"), run, clock) == "cublas"
    with pytest.raises(RuntimeError, match="room for none of 1 candidates"):
        tuning.tune((TILES,), run, clock)


def test_other_errors_of_a_candidate_are_not_hidden() -> None:
    def run(choice: Choice) -> None:
        raise ValueError("x_q has shape")

    with pytest.raises(ValueError, match="x_q has shape"):
        tuning.tune((TILES,), run, Clock({}))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("card", [HOPPER, BLACKWELL], ids=lambda card: card.name)
@pytest.mark.parametrize("m", [1, 16, 64, 4096])
def test_candidates_hold_the_default_first_and_cublas_last(
    kernel: Kernel, card: Card, m: int
) -> None:
    found = candidates.candidates(kernel, m, 2560, 6912, card)
    assert found[0] == candidates.default(kernel, m, 2560, 6912, card)
    assert found[-1] == "cublas"
    assert len(found) == len(set(found)) > 2


def test_a_split_keeps_every_multiprocessor_busy_and_no_block_is_split() -> None:
    def split(n: int, k: int) -> int:
        return candidates.default("split_k", 1, n, k, HOPPER).split

    assert split(2560, 6912) == 6  # 40 tiles × 6 programs for 2 × 132
    assert split(128, 6912) == 27  # as many as there are blocks
    assert split(128_256, 2560) == 1
    assert split(0, 0) == 1


def test_only_blackwell_is_given_fp16() -> None:
    for card, operand in ((HOPPER, "int8"), (BLACKWELL, "fp16"), (Card("", 100, 120), "int8")):
        assert candidates.default("packed_gemm", 512, 2560, 2560, card).operand == operand


@pytest.mark.parametrize(("m", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_a_measurement_holds_up_to_the_next_power_of_two(m: int, bucket: int) -> None:
    assert Key.of("packed_gemm", m, 2560, 6912) == Key("packed_gemm", 2560, 6912, bucket)


def test_what_is_recorded_is_chosen_from_then_on(own_cache: Path) -> None:
    card = tuning.card_of(CPU)
    key = Key.of("packed_gemm", 100, 2560, 6912)
    before = tuning.choose("packed_gemm", 100, 2560, 6912, CPU)
    assert before == candidates.default("packed_gemm", 100, 2560, 6912, card)
    path = tuning.record(card.name, {key: TileConfig(256, 64, stages=5)})
    assert path.parent == own_cache
    assert tuning.choose("packed_gemm", 128, 2560, 6912, CPU) == TileConfig(256, 64, stages=5)
    assert tuning.choose("packed_gemm", 129, 2560, 6912, CPU) != TileConfig(256, 64, stages=5)


def test_the_users_measurement_goes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped")
    card = tuning.card_of(CPU).name
    one, other = Key("split_k", 64, 256, 1), Key("split_k", 64, 256, 2)
    tuning.record(card, {one: TileConfig(16, 16), other: TileConfig(16, 32)}, tuning.SHIPPED)
    tuning.record(card, {one: "cublas"})
    assert tuning.choose("split_k", 1, 64, 256, CPU) == "cublas"
    assert tuning.choose("split_k", 2, 64, 256, CPU) == TileConfig(16, 32)


def test_a_table_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / table.file_name(HOPPER.name)
    assert path.name == "nvidia-h100-80gb-hbm3.json"
    first: table.Table = {
        Key("split_k", 64, 256, 1): TileConfig(16, 16, split=4),
        Key("int8_gemm", 64, 256, 1): "cublas",
    }
    table.merge(path, HOPPER.name, first)
    assert table.read(path) == first
    second: table.Table = {Key("int8_gemm", 64, 256, 1): TileConfig(16, 64, 128)}
    table.merge(path, HOPPER.name, second)
    assert table.read(path) == {**first, **second}
    assert json.loads(path.read_text())["card"] == HOPPER.name
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_reader_never_sees_half_a_table(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    table.merge(path, "card", {Key("split_k", n, 256, 1): TILES for n in range(200)})
    writer = threading.Thread(
        target=lambda: [
            table.merge(path, "card", {Key("split_k", 0, 0, 1): TILES}) for _ in "12345"
        ]
    )
    writer.start()
    sizes = {len(table.read(path)) for _ in range(20)}
    writer.join()
    assert sizes <= {200, 201}


def test_a_file_of_another_version_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(json.dumps({"version": table.VERSION + 1, "choices": [{"new": 1}]}))
    assert table.read(path) == {}


def rows(**row: object) -> str:
    return json.dumps({"version": table.VERSION, "choices": [row]})


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"choices": []}',
        rows(kernel="gemv", n=1, k=1, m=1, choice="cublas"),
        rows(kernel="split_k", choice="cublas"),
        rows(kernel="split_k", n=1, k=1, m=1, choice="fast"),
        rows(kernel="split_k", n=1, k=1, m=1, choice={"block_m": 17, "block_n": 16}),
    ],
)
def test_a_spoilt_file_is_refused_and_costs_a_run_only_its_tiles(
    content: str, own_cache: Path
) -> None:
    own_cache.mkdir(parents=True)
    path = own_cache / table.file_name(tuning.card_of(CPU).name)
    path.write_text(content)
    with pytest.raises(ValueError, match="is no table of tiles"):
        table.read(path)
    with pytest.warns(UserWarning, match="tuned tiles are not used"):
        choice = tuning.choose("split_k", 1, 64, 256, CPU)
    assert choice == candidates.default("split_k", 1, 64, 256, tuning.card_of(CPU))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_product_is_tuned_by_running_every_candidate(
    kernel: Kernel, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles: tuple[Choice, ...] = (TileConfig(16, 16, 64), TileConfig(16, 32, 64), "cublas")
    monkeypatch.setattr(products, "candidates", lambda *_: tiles)
    calls = iter((3.0, 1.0, 2.0))

    def timer(call: Callable[[], object]) -> float:
        call()
        return next(calls)

    assert products.tune(kernel, 3, 20, 70, device, timer) == TileConfig(16, 32, 64)
    assert tuning.choose(kernel, 4, 20, 70, device) == TileConfig(16, 32, 64)


def test_the_command_keeps_what_it_measured_in_the_folder_it_is_given(
    device: torch.device,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiles: tuple[Choice, ...] = (TileConfig(16, 16, 64),)
    monkeypatch.setattr(products, "candidates", lambda *_: tiles)

    def timer(call: Callable[[], object]) -> float:
        call()
        return 1.0

    folder = tmp_path / "shipped"
    layers = ["--layer", "20x70", "8x8", "--tokens", "1", "17", "--folder", str(folder)]
    assert tune.main(layers, device, timer) == 0
    kept = table.read(folder / table.file_name(tuning.card_of(device).name))
    assert set(kept) == {
        Key(kernel, n, k, m)
        for n, k in ((20, 70), (8, 8))
        for kernel, m in (("split_k", 1), ("packed_gemm", 32))
    }
    assert capsys.readouterr().out.count("TileConfig(") == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--layer", "20x70", "--tokens", "1"], "error: torch finds no GPU"),
        (["--layer", "20", "--tokens", "1"], "'20': write it like 2560x6912"),
        (["--layer", "0x10", "--tokens", "1"], "'0x10': write it like 2560x6912"),
        (["--layer", "8x131073", "--tokens", "1"], "products are exact up to K = 131072"),
        (["--layer", "20x70", "--tokens", "0"], "'0': a number of at least 1 is wanted"),
        (
            ["--layer", "20x70", "--tokens", "1", "17", "--kernel", "split_k"],
            "--tokens 17: split_k takes at most 16",
        ),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        code = tune.main(arguments)
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"), [("block_m", 48), ("block_n", 0), ("warps", 3), ("split", 0), ("stages", 0)]
)
def test_tiles_that_cannot_be_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        TileConfig(**{"block_m": 16, "block_n": 16, field: value})
