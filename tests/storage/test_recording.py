from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from retrain.errors import CheckpointError
from retrain.storage.recording import drop_recordings, read_recordings, write_recording
from retrain.types import Completion, Example, Group, Score


def completion(length: int, text: str = "an answer", **extra: object) -> Completion:
    rng = np.random.default_rng(length)
    return Completion(
        token_ids_T=rng.integers(0, 200_000, size=length),
        logprobs_T=-rng.random(length).astype(np.float32),
        text=text,
        finish_reason="length" if length % 2 else "stop",
        **extra,  # type: ignore[arg-type]
    )


def entropies(length: int) -> dict[str, object]:
    return {"entropies_T": np.random.default_rng(length + 100).random(length).astype(np.float32)}


CHAT = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"})

GROUPS = [
    Group(
        Example("plain \u2028 prompt \x85", "4", "row 1"),
        np.arange(5),
        (completion(3, "é \U0001f600", **entropies(3)), completion(0, "", **entropies(0))),
        (Score(1.0, "right"), Score(0.1 + 0.2, "wrong")),
    ),
    Group(
        Example(CHAT, "four", "row 2"),
        np.arange(150_000, 150_003),
        (completion(8, **entropies(8)),),
        (Score(0.0, "timeout"),),
    ),
]


def assert_equal(read: list[Group], written: list[Group]) -> None:
    assert len(read) == len(written)
    for mine, theirs in zip(read, written, strict=True):
        assert mine.example == theirs.example
        assert mine.scores_G == theirs.scores_G
        np.testing.assert_array_equal(mine.prompt_ids, theirs.prompt_ids)
        assert len(mine.completions_G) == len(theirs.completions_G)
        for a, b in zip(mine.completions_G, theirs.completions_G, strict=True):
            assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
            for name in ("token_ids_T", "logprobs_T", "entropies_T", "sampled_T"):
                x, y = getattr(a, name), getattr(b, name)
                assert (x is None) == (y is None), name
                if x is not None:
                    assert x.dtype == y.dtype
                    np.testing.assert_array_equal(x, y)


def test_what_is_recorded_reads_back_equal(tmp_path: Path) -> None:
    write_recording(tmp_path, 12, GROUPS)
    write_recording(tmp_path, 3, GROUPS[:1])
    recorded = list(read_recordings(tmp_path))
    assert [step for step, _ in recorded] == [3, 12]
    assert_equal(recorded[1][1], GROUPS)
    assert_equal(recorded[0][1], GROUPS[:1])


def test_rollouts_without_entropies_read_back_without(tmp_path: Path) -> None:
    groups = [Group(Example("a", "b"), np.arange(2), (completion(4),), (Score(1.0, "right"),))]
    write_recording(tmp_path, 0, groups)
    assert_equal(next(read_recordings(tmp_path))[1], groups)


def test_tokens_that_an_environment_wrote_stay_apart(tmp_path: Path) -> None:
    groups = [
        Group(
            Example("a", "b"),
            np.arange(2),
            (completion(3, sampled_T=np.array([True, False, True])), completion(2, sampled_T=np.ones(2, bool))),
            (Score(1.0, "right"), Score(0.0, "wrong")),
        )
    ]
    write_recording(tmp_path, 0, groups)
    assert_equal(next(read_recordings(tmp_path))[1], groups)


def test_a_recording_cut_off_by_a_kill_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_recording(tmp_path, 0, GROUPS)

    def tear(file: Path, **arrays: object) -> None:
        Path(file).write_bytes(b"PK half of it")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", tear)
        with pytest.raises(KeyboardInterrupt):
            write_recording(tmp_path, 1, GROUPS)
    assert [step for step, _ in read_recordings(tmp_path)] == [0]
    write_recording(tmp_path, 1, GROUPS)
    assert [step for step, _ in read_recordings(tmp_path)] == [0, 1]


def test_a_full_disk_is_reported_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_recording(tmp_path, 0, GROUPS)


def test_later_recordings_are_dropped_at_a_resume(tmp_path: Path) -> None:
    for step in range(4):
        write_recording(tmp_path, step, GROUPS[:1])
    drop_recordings(tmp_path, 2)
    assert [step for step, _ in read_recordings(tmp_path)] == [0, 1]


@pytest.mark.parametrize("name", ["step_copy.npz", "step_².npz", "step_.npz", "step_000001 (1).npz"])
def test_a_copy_among_the_recordings_is_not_one_of_them(tmp_path: Path, name: str) -> None:
    write_recording(tmp_path, 1, GROUPS)
    copy = tmp_path / "rollouts" / name
    copy.write_bytes((tmp_path / "rollouts" / "step_000001.npz").read_bytes())
    assert [step for step, _ in read_recordings(tmp_path)] == [1]
    drop_recordings(tmp_path, 0)
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.98])
def test_a_truncated_recording_is_an_error_that_names_it(tmp_path: Path, share: float) -> None:
    write_recording(tmp_path, 1, GROUPS)
    path = tmp_path / "rollouts" / "step_000001.npz"
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(CheckpointError, match=r"step_000001\.npz is damaged"):
        list(read_recordings(tmp_path))


def test_recordings_are_compact(tmp_path: Path) -> None:
    groups = [
        Group(Example("q", "a"), np.arange(20), tuple(completion(500) for _ in range(8)), 8 * (Score(1.0, "right"),))
    ]
    write_recording(tmp_path, 0, groups)
    # Four bytes an id and four a log-prob, before compression.
    assert (tmp_path / "rollouts" / "step_000000.npz").stat().st_size < 8 * 500 * 8 + 3000
