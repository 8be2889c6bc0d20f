"""What a run carries beside its weights: saved and taken over as it was."""

import json
from pathlib import Path

import pytest

from megabit.config import Config, GuardConfig, GuardRule, PrecisionConfig
from megabit.data.step_plan import SampleWindows
from megabit.errors import UserError
from megabit.training.guard import Deed
from megabit.training.loss_scale import LARGEST, LossScale
from megabit.training.progress import MeasuresFile, Progress

RULES = GuardConfig([GuardRule(watch="loss_spike", above=6, window=4, action="rollback")])
FP16 = Config(precision=PrecisionConfig(compute="float16", loss_scale_interval=3), guard=RULES)


def used() -> Progress:
    progress = Progress.of(FP16)
    for step in range(6):
        progress.guard.judge(step, 3 + 0.1 * step, 1 / 3)
        progress.loss_scale.after_step(overflowed=step == 4)
    progress.guard.deeds["a rule"] = Deed(2, 17)
    progress.left_out = SampleWindows.of([8, 16, 40, 48])
    progress.lr_factor = 0.25
    progress.full_precision_activations = True
    return progress


def test_state_and_measures_survive_json() -> None:
    progress, other = used(), Progress.of(FP16)
    other.restore_state(json.loads(json.dumps(progress.state())))
    other.restore_measures(json.loads(json.dumps(progress.measures())))
    assert other == progress


def test_state_goes_back_and_measures_stay() -> None:
    progress = used()
    saved = Progress.of(FP16).state()
    progress.restore_state(saved)
    assert progress.guard.history.losses == []
    assert progress.loss_scale == LossScale(65536.0, 3)
    assert progress.guard.deeds == {"a rule": Deed(2, 17)}
    assert progress.lr_factor == 0.25


def test_measures_of_a_checkpoint_and_of_the_file_add_up() -> None:
    older = {"left_out": [0, 8], "lr_factor": 0.5, "deeds": {"a": [7, 10], "b": [1, 3]}}
    newer = {"lr_factor": 0.25, "deeds": {"a": [12, 40]}, "full_precision_activations": True}
    for saved in ((older, newer), (newer, older)):
        progress = Progress.of(FP16)
        for measures in saved:
            progress.restore_measures(measures)
        assert progress.left_out == SampleWindows(((0, 8),))
        assert progress.lr_factor == 0.25
        assert progress.full_precision_activations
        assert progress.guard.deeds == {"a": Deed(12, 40), "b": Deed(1, 3)}


def test_an_old_checkpoint_has_none_of_it() -> None:
    progress = Progress.of(FP16)
    progress.restore_state({})
    progress.restore_measures({})
    assert progress == Progress.of(FP16)


def test_the_file_is_written_and_read(tmp_path: Path) -> None:
    file, progress = MeasuresFile(tmp_path / "measures.json"), used()
    assert file.read() is None
    file.write(progress)
    assert file.read() == progress.measures()


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "measures.json"
    path.write_text(text)
    with pytest.raises(UserError, match="cannot be read") as caught:
        MeasuresFile(path).read()
    assert str(path) in str(caught.value)


def test_the_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(8.0, 2)
    values = []
    for overflowed in (False, False, True, False, True, False, False):
        scale.after_step(overflowed)
        values.append(scale.value)
    assert values == [8, 16, 8, 8, 4, 4, 8]


def test_the_loss_scale_has_bounds() -> None:
    scale = LossScale(2.0, 1)
    for _ in range(5):
        scale.after_step(overflowed=True)
    assert scale.value == 1.0
    assert not scale.may_shrink
    scale = LossScale(LARGEST, 1)
    scale.after_step(overflowed=False)
    assert scale.value == LARGEST


def test_without_fp16_the_loss_is_not_scaled() -> None:
    scale = LossScale.of(PrecisionConfig(compute="bfloat16"))
    for overflowed in (True, False):
        scale.after_step(overflowed)
    assert scale == LossScale(1.0, None)
    assert not scale.may_shrink
