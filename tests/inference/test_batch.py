"""A batch arrives as it was sent."""

import dataclasses

import numpy as np

from megabit.inference.batch import Batch, Kind, Wanted


def test_a_batch_is_the_same_after_its_way() -> None:
    def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, np.int64)

    sampling = {"temperature": 0.7, "noise": 2**62 + 1, "answer_tokens": [3, 4]}
    batch = Batch(
        Kind.FORWARD,
        17,
        ints(5, 6, 7),
        ints(0, 1, 9),
        ints(32, 33, 7),
        ints(0, 2, 3),
        ints(2, 10),
        np.array([[2, 0], [1, 3]], np.int64),
        (Wanted(1, 99, 3, None), Wanted(2, None, None, sampling)),
        is_lossy=False,
    )
    arrived = Batch.decode(batch.encode())
    for field in dataclasses.fields(Batch):
        sent, got = getattr(batch, field.name), getattr(arrived, field.name)
        assert np.array_equal(sent, got) if isinstance(sent, np.ndarray) else sent == got
    assert arrived.result_shape == (2, 8)


def test_an_empty_one_does_so_too() -> None:
    arrived = Batch.decode(Batch(Kind.END, 0).encode())
    assert arrived.kind is Kind.END
    assert arrived.num_tokens == 0
    assert arrived.block_tables.shape == (0, 0)
    assert arrived.result_shape == (1, 2)
