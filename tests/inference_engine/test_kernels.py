"""Our Triton kernels against plain loops, interpreted on the CPU; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from retrain.modeling.triton_internals import build_launchers_quickly

from .kernel_checks import (
    CACHES,
    SHAPES,
    check_attention,
    check_drawing,
    check_endings,
    check_frequencies,
    check_logprobs,
    check_small_batch,
)

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed; it comes with CUDA builds of PyTorch", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("compiled kernels are checked by tests/gpu", allow_module_level=True)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("retrain.inference_engine.pytorch.kernels")


MODULE = """
#include <Python.h>
static PyObject *two(PyObject *self, PyObject *none) { return PyLong_FromLong(2); }
static PyMethodDef methods[] = {{"two", two, METH_NOARGS, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "built", NULL, -1, methods};
PyMODINIT_FUNC PyInit_built(void) { return PyModule_Create(&module); }
"""


@pytest.mark.parametrize("works", [True, False], ids=["ours", "Triton's own"])
def test_what_launches_a_kernel_is_built(works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = importlib.import_module("triton.runtime.build")
    knobs = importlib.import_module("triton").knobs
    plain, commands = subprocess.run, []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return plain(["false"] if "-O0" in command and not works else command, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(knobs.build, "impl", None)
    monkeypatch.setattr("retrain.modeling.triton_internals.subprocess.run", run)
    build_launchers_quickly()
    assert build.compile_module_from_src(MODULE, "built").two() == 2
    assert sum("-O0" in command for command in commands) == 1
    assert (knobs.build.impl is not None) == works


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_plain_loops(kernels: ModuleType, shape: str) -> None:
    check_attention(kernels, shape, torch.float32, "cpu")


@pytest.mark.parametrize("cache", CACHES)
def test_attention_reads_and_writes_every_kind_of_cache(kernels: ModuleType, cache: str) -> None:
    check_attention(kernels, "split", CACHES[cache], "cpu")


def test_a_draw_comes_with_its_logprob_and_the_entropy(kernels: ModuleType) -> None:
    check_drawing(kernels, "cpu")


def test_rows_end_at_a_stop_token_or_at_their_limit(kernels: ModuleType) -> None:
    check_endings(kernels, "cpu")


def test_tokens_are_drawn_as_often_as_they_should_be(kernels: ModuleType) -> None:
    check_frequencies(kernels, "cpu", rows=150, rounds=1)


@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 100, 512), (8, 130, 1024), (20, 64, 512)])
def test_products_of_a_few_rows_are_exact_on_whole_numbers(rows: int, outputs: int, width: int) -> None:
    small_batch = importlib.import_module("retrain.inference_engine.pytorch.small_batch")
    check_small_batch(small_batch, rows, outputs, width, "cpu")


def test_matrices_that_no_plan_divides_evenly_are_left_to_cublas() -> None:
    small_batch = importlib.import_module("retrain.inference_engine.pytorch.small_batch")
    assert small_batch.plan(2560, 9728) == (256, 2, 4)
    assert small_batch.plan(19456, 2560) == (128, 1, 3)
    assert small_batch.plan(6144, 2560) == (256, 1, 4)
    assert small_batch.plan(576, 576) is None


@pytest.mark.parametrize(("vocabulary", "dtype"), [(5000, torch.float32), (37, torch.float32), (8192, torch.bfloat16)])
def test_logprobs_and_their_derivatives_are_those_of_plain_pytorch(vocabulary: int, dtype: torch.dtype) -> None:
    kernels = importlib.import_module("retrain.modeling.logprob_kernels")
    check_logprobs(kernels, vocabulary, dtype, "cpu")
