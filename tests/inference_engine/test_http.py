"""The client against a loopback server: what it draws, what it makes of log-probs, delivery, faults, proof."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow
from e2e.tiny import CHAT_TEMPLATE, config_for, policy_for, random_prompts, write_model, write_tokenizer
from transformers import AutoTokenizer

from retrain.checks.keys import missing_keys
from retrain.config import load_config
from retrain.config.schema import Inference
from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine import Turn
from retrain.inference_engine.http.engine import HttpEngine
from retrain.inference_engine.http.proof import PolicyScorer, Row
from retrain.inference_engine.http.spec import ServerSpec
from retrain.inference_engine.openai import OPENAI
from retrain.inference_engine.pytorch import PyTorchEngine
from retrain.inference_engine.vllm import VLLM
from retrain.modeling.policy import Policy
from retrain.types import Completion, IntArray, Sampling

from .loopback import Loopback

SAMPLING = Sampling(max_tokens=12, n=3, temperature=0.7, top_p=0.9, seed=5)
PROMPTS = random_prompts([5, 9, 3, 7])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_model(tmp_path_factory.mktemp("served"), "qwen3"), CHAT_TEMPLATE)


@pytest.fixture
def server(model: Path) -> Iterator[Loopback]:
    with Loopback(model) as running:
        yield running


@dataclass
class Rig:
    """An engine over its servers, and the policy that is being trained."""

    engine: HttpEngine
    policy: Policy
    logged: list[str]

    def check(self, sampling: Sampling = SAMPLING) -> int:
        return self.engine.check(sampling, self.logged.append)

    def train(self, seed: int = 1, scale: float = 0.1) -> None:
        """Move the adapter."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.policy.adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator) * scale)


Make = Callable[..., Rig]


@pytest.fixture
def rig(model: Path) -> Iterator[Make]:
    made: list[HttpEngine] = []

    def make(*servers: Loopback, spec: ServerSpec = VLLM, rank: int = 4, **settings: Any) -> Rig:
        policy = policy_for(config_for(model, model__lora_rank=rank), trained=False)
        urls = ",".join(server.url for server in servers)
        inference = Inference(**{"timeout_s": 20.0, "wait_s": 1.0, "url": urls} | settings)
        engine = HttpEngine(spec, policy, inference, AutoTokenizer.from_pretrained(model), lambda *_: None)
        made.append(engine)
        return Rig(engine, policy, [])

    yield make
    for engine in made:
        engine.shutdown()


def ratios(policy: Policy, prompts: list[IntArray], groups: list[list[Completion]], sampling: Sampling) -> np.ndarray:
    """Importance ratios on fresh weights: the trainer's log-probs against the engine's."""
    rows = [Row(p, c.token_ids_T, c.logprobs_T) for p, group in zip(prompts, groups, strict=True) for c in group]
    own = np.concatenate(PolicyScorer(policy).logprobs(rows, sampling))
    return np.exp(own - np.concatenate([row.logprobs_T for row in rows]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "meaning"), [(OPENAI, "raw"), *slow((VLLM, "sampled"), (OPENAI, "sampled"), (VLLM, "raw"))]
)
def test_temperature_zero_is_greedy_whatever_the_server_reports_of_it(
    server: Loopback, rig: Make, spec: ServerSpec, meaning: str
) -> None:
    server.meaning = meaning
    one = rig(server, spec=spec)
    one.check(replace(SAMPLING, top_p=1.0))
    one.train()
    one.engine.sync(one.policy)
    greedy = Sampling(max_tokens=12, temperature=0.0, seed=1)
    first, second = (one.engine.generate(PROMPTS, replace(greedy, seed=seed)) for seed in (1, 2))
    here = PyTorchEngine(one.policy, Inference(), one.engine.tokenizer, lambda *_: None).generate(PROMPTS, greedy)
    for groups in (second, here):
        assert [g[0].token_ids_T.tolist() for g in groups] == [g[0].token_ids_T.tolist() for g in first]
    assert all(completion.logprobs_T.tolist() == [0.0] * len(completion.token_ids_T) for (completion,) in first)


@pytest.mark.parametrize("meaning", ["tempered", *slow("raw", "sampled", "untempered")])
def test_the_ratio_on_fresh_weights_is_one_whatever_the_server_reports(
    rig: Make, server: Loopback, meaning: str
) -> None:
    server.meaning = meaning
    one = rig(server)
    sampling = replace(SAMPLING, repetition_penalty=1.2)
    one.check(sampling)
    one.train()
    one.engine.sync(one.policy)
    groups = one.engine.generate(PROMPTS, sampling)
    assert one.engine.survey.meaning == meaning
    assert np.abs(ratios(one.policy, PROMPTS, groups, sampling) - 1).max() < 0.02
    assert any("recomputed here" in line for line in one.logged) == (meaning != "sampled")


def test_completions_come_in_order_and_the_same_seed_draws_the_same(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    first, second = one.engine.generate(PROMPTS, SAMPLING), one.engine.generate(PROMPTS, SAMPLING)
    other = one.engine.generate(PROMPTS, replace(SAMPLING, seed=6))
    texts = [[completion.text for completion in group] for group in first]
    assert [len(group) for group in first] == [3, 3, 3, 3]
    assert texts == [[completion.text for completion in group] for group in second]
    assert texts != [[completion.text for completion in group] for group in other]
    assert all(len(set(group)) > 1 for group in texts)
    sent = [body["prompt"] for body in server.asked[-4:]]
    assert sorted(sent) == sorted(prompt.tolist() for prompt in PROMPTS)
    for completion in first[0]:
        assert completion.finish_reason == ("stop" if completion.token_ids_T[-1] == 2 else "length")


@pytest.mark.slow
def test_a_server_that_ignores_n_is_asked_once_for_each_completion_with_seeds_of_their_own(
    rig: Make, server: Loopback
) -> None:
    server.takes_n = False
    one = rig(server)
    one.check()
    before = len(server.asked)
    groups = one.engine.generate(PROMPTS[:2], SAMPLING)
    assert [len(group) for group in groups] == [3, 3]
    assert len({body["seed"] for body in server.asked[before:]}) == 6
    assert len({completion.text for completion in groups[0]}) > 1


def test_an_adapter_is_delivered_once_and_the_one_before_goes(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    folder = one.engine.folder.path
    one.engine.sync(one.policy)
    assert len(server.events) == 1, "unchanged weights are not sent again"
    for seed in range(3):
        one.train(seed)
        one.engine.sync(one.policy)
        assert list(server.adapters) == [one.engine.adapter.name]  # type: ignore[union-attr]
        assert [path.name for path in folder.iterdir()] == list(server.adapters)
    one.engine.shutdown()
    assert server.adapters == {}
    assert not folder.exists()


@pytest.mark.slow
def test_several_servers_share_the_requests_and_all_get_the_adapter(rig: Make, server: Loopback, model: Path) -> None:
    with Loopback(model) as second:
        one = rig(server, second)
        one.check()
        one.train()
        one.engine.sync(one.policy)
        before = len(server.asked), len(second.asked)
        one.engine.generate(PROMPTS, SAMPLING)
        assert (len(server.asked) - before[0], len(second.asked) - before[1]) == (2, 2)
        assert list(server.adapters) == list(second.adapters)
        assert len(one.engine.verdicts) == 2, "each server is proved"
        one.engine.shutdown()


# -- start-up ----------------------------------------------------------------------------------------------------------


def set_on(server: Loopback, **values: Any) -> None:
    for name, value in values.items():
        setattr(server, name, value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"sends_ids": False}, "has no token ids.*0.10.2"),
        ({"loads_adapters": False}, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        ({"context": 10}, "has a context of 10 tokens, but .* max_tokens = 12.*--max-model-len"),
        ({"token_shift": 1}, "a different tokenizer"),
        *slow(
            ({"sends_logprobs": False}, "has no log-probs.*--max-logprobs"),
            ({"max_rank": 2}, "greater than max_lora_rank 2.*--max-lora-rank 8"),
            ({"max_rank": 2, "rank_status": 500}, "500: .*greater than max_lora_rank 2.*--max-lora-rank 8"),
            ({"key": "secret"}, "requires a different API key.*INFERENCE_API_KEY"),
        ),
    ],
)
def test_a_server_that_lacks_something_is_rejected_with_the_fix(
    rig: Make, server: Loopback, values: dict[str, Any], expected: str
) -> None:
    set_on(server, **values)
    with pytest.raises(ConfigError, match=expected):
        rig(server).check()


def test_a_server_with_another_model_is_rejected(rig: Make, tmp_path: Path) -> None:
    other = write_tokenizer(write_model(tmp_path / "other", "llama"))
    with (
        Loopback(other, name="other") as server,
        pytest.raises(ConfigError, match=r"serves 'other', which differs from"),
    ):
        rig(server).check()


def test_a_wrong_key_is_rejected_and_the_right_one_works(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "secret"
    monkeypatch.setenv("INFERENCE_API_KEY", "guess")
    with pytest.raises(ConfigError, match="requires a different API key"):
        rig(server).check()
    monkeypatch.setenv("INFERENCE_API_KEY", "secret")
    rig(server).check()


@pytest.mark.parametrize("route", ["/v1/completions", *slow("/health", "/v1/models", "/v1/load_lora_adapter")])
def test_a_key_that_only_some_routes_want_is_asked_for_all_the_same(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    respond = server.respond

    def guarded(path: str, body: dict[str, Any], key: str) -> Any:
        return (401, {"error": "Unauthorized"}) if path == route else respond(path, body, key)

    monkeypatch.setattr(server, "respond", guarded)
    with pytest.raises(ConfigError, match=r"requires a different API key \(it replied 401: Unauthorized\)"):
        rig(server).check()


def test_a_key_that_is_taken_away_while_training_is_reported(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    server.key = "new"
    with pytest.raises(RolloutError, match=r"401: Unauthorized.*a different API key than the one in INFERENCE_API_KEY"):
        one.engine.generate(PROMPTS, SAMPLING)


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", *slow("/v1/completions")])
@pytest.mark.parametrize("fault", [b"", pytest.param((500, {"error": "EngineDeadError"}), marks=pytest.mark.slow)])
def test_a_server_that_dies_of_its_first_adapter_is_not_reported_to_lack_adapters(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch, path: str, fault: Any
) -> None:
    respond = server.respond

    def die(asked: str, body: dict[str, Any], key: str) -> Any:
        last = asked == path and (asked != "/v1/completions" or body["model"] != server.name)
        return fault if last else respond(asked, body, key)

    monkeypatch.setattr(server, "respond", die)
    with pytest.raises(ConfigError, match=r"failed when it loaded its first adapter.*check its log") as raised:
        rig(server, wait_s=0.2).check()
    assert "--enable-lora" not in str(raised.value)


def test_nobody_at_the_port_is_reported_after_the_wait(rig: Make, server: Loopback) -> None:
    server.stop()
    one = rig(server, wait_s=0.6)
    shown: list[str] = []
    one.engine.fleet.progress = lambda phase, done, total: shown.append(f"{phase} {done}/{total}")
    with pytest.raises(
        ConfigError, match=r"no server responds at .* after \d+ s.*vllm serve .* --max-lora-rank 8 --logprobs"
    ):
        one.check()
    assert one.logged == [f"Waiting for {server.url}, up to 1 s ..."]
    assert shown[0] == f"waiting for {server.url} (seconds) 0/0"
    server.start()


def test_a_server_that_comes_up_late_is_waited_for(rig: Make, server: Loopback) -> None:
    server.stop()
    one = rig(server, wait_s=20.0)
    later = threading.Timer(0.7, server.start)
    later.start()
    one.check()
    later.join()
    assert one.logged[0].startswith("Waiting for")


def test_something_else_at_the_port_is_distinguished(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "respond", lambda path, body, key: (200, ["a web page"]))
    with pytest.raises(ConfigError, match="is not a vllm server"):
        rig(server).check()
    monkeypatch.setattr(server, "respond", lambda path, body, key: (404, "<!DOCTYPE HTML><html>No such page</html>"))
    with pytest.raises(ConfigError, match="is not a vllm server: /v1/models replied 404: a web page"):
        rig(server).check()


def test_a_sampling_option_that_the_server_means_otherwise_is_rejected(rig: Make, server: Loopback) -> None:
    with pytest.raises(ConfigError, match=r"top_k = 5 is not supported by engine = .openai."):
        rig(server, spec=OPENAI).check(replace(SAMPLING, top_k=5))


def test_two_cuts_that_the_server_makes_in_another_order_are_rejected_together(rig: Make, server: Loopback) -> None:
    one = rig(server)
    with pytest.raises(ConfigError, match=r"top_p and min_p cannot both be set.*min_p = 0.0"):
        one.check(replace(SAMPLING, min_p=0.1))
    one.check(replace(SAMPLING, top_p=1.0, min_p=0.1))


def test_an_adapter_folder_that_cannot_be_made_is_rejected(rig: Make, server: Loopback, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="adapter_dir"):
        rig(server, adapter_dir=str(tmp_path / "file"))


# -- faults ------------------------------------------------------------------------------------------------------------

CUT = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{"choices": [{"index"'[:-1]
SHORT = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n{"choices": ['
FAULTS: dict[str, Any] = {
    "429": (429, {"error": "busy"}),
    "500": (500, {"error": "oops"}),
    "503": (503, {}),
    "a dropped connection": b"",
    "truncated JSON": CUT,
    "a body that ends early": SHORT,
    "too few completions": (200, {"choices": []}),
    "something else": (200, {"hello": 1}),
    "log-probs that are none": (
        200,
        {"choices": [{"index": n, "token_ids": [2], "logprobs": {"token_logprobs": [None]}} for n in range(3)]},
    ),
    "a log-prob too few": (
        200,
        {"choices": [{"index": n, "token_ids": [5, 2], "logprobs": {"token_logprobs": [-1.0]}} for n in range(3)]},
    ),
    "an unknown token": (
        200,
        {"choices": [{"index": n, "token_ids": [999], "logprobs": {"token_logprobs": [-1.0]}} for n in range(3)]},
    ),
    "no tokens": (
        200,
        {"choices": [{"index": n, "token_ids": [], "logprobs": {"token_logprobs": []}} for n in range(3)]},
    ),
    "a number for a list": (
        200,
        {"choices": [{"index": n, "token_ids": 5, "logprobs": {"token_logprobs": [-1.0]}} for n in range(3)]},
    ),
    "an early end": (
        200,
        {"choices": [{"index": n, "token_ids": [9], "logprobs": {"token_logprobs": [-1.0]}} for n in range(3)]},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults", [("429", "a dropped connection", "an unknown token"), *slow((tuple(FAULTS),))], ids=["some", "all"]
)
def test_a_passing_fault_changes_nothing_that_is_drawn(
    rig: Make, server: Loopback, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    one = rig(server)
    one.check()
    calm = one.engine.generate(PROMPTS, SAMPLING)
    for fault in faults:
        server.faults = [lambda body, reply=FAULTS[fault]: reply] * 2
        rough = one.engine.generate(PROMPTS, SAMPLING)
        assert not server.faults, f"{fault} was not met"
        assert [[c.text for c in group] for group in calm] == [[c.text for c in group] for group in rough], fault


@pytest.mark.parametrize("fault", ["429", *slow("too few completions", "500", "truncated JSON")])
def test_a_fault_that_stays_ends_the_call_after_a_bounded_number_of_tries(
    rig: Make, server: Loopback, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    one = rig(server)
    one.check()
    before = len(server.asked)
    server.faults = [lambda body: FAULTS[fault]] * 1000
    with pytest.raises(RolloutError, match="in 5 attempts"):
        one.engine.generate(PROMPTS, SAMPLING)
    assert len(server.asked) - before <= 5 * len(PROMPTS)


def test_a_passing_reply_at_the_start_is_asked_for_again(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    refused: set[str] = set()

    def once(body: dict[str, Any]) -> Any:
        is_first = body["model"] not in refused
        refused.add(body["model"])
        return FAULTS["429"] if is_first else None

    server.faults = [once] * 100
    rig(server).check()
    assert len(refused) == 2, "the base model and the adapter"


def test_a_server_that_stays_busy_is_not_said_to_lack_adapters(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    server.faults = [lambda body: FAULTS["429"] if body["model"] != server.name else None] * 100
    with pytest.raises(ConfigError, match="failed when it loaded its first adapter: it replied 429: busy") as caught:
        rig(server).check()
    assert "--enable-lora" not in str(caught.value)


def test_a_key_may_end_in_a_newline_and_has_no_odd_characters(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "sk-of-the-server"
    monkeypatch.setenv("INFERENCE_API_KEY", "sk-of-the-server\n")
    rig(server).check()
    monkeypatch.setenv("INFERENCE_API_KEY", "sk-of-the\u201dserver")
    with pytest.raises(ConfigError, match=r"^INFERENCE_API_KEY contains invalid characters\.  Try: copy it again$"):
        rig(server)
    config = load_config(None, {"inference.engine": "vllm", "inference.url": server.url})
    ((name, issue),) = missing_keys(config)
    assert name == "INFERENCE_API_KEY"
    assert str(issue) == "INFERENCE_API_KEY contains invalid characters.  Try: copy it again"


def test_a_server_that_hangs_does_not_delay_the_end(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FAREWELL_S", 0.2)
    one = rig(server)
    one.check()
    gate = threading.Event()
    monkeypatch.setattr(server, "unload", lambda body: gate.wait(30) and (200, {}))
    started = time.monotonic()
    one.engine.shutdown()
    gate.set()
    assert time.monotonic() - started < 5


@pytest.mark.slow
def test_a_server_that_always_fails_costs_nothing_if_there_is_another(
    model: Path, rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.1)
    with Loopback(model) as second:
        one = rig(server, second)
        one.check()
        second.faults = [lambda body: FAULTS["500"]] * 1000
        groups = one.engine.generate(PROMPTS * 8, SAMPLING)
    assert [len(group) for group in groups] == [3] * 4 * 8
    told = [line for line in one.logged if line.startswith("Warning: ")]
    assert told == [f"Warning: {second.url}: it replied 500: oops. Requests that fail are sent again."]


@pytest.mark.slow
def test_a_server_that_keeps_hanging_is_left_out_while_another_replies(
    model: Path, rig: Make, server: Loopback
) -> None:
    gate = threading.Event()
    with Loopback(model) as second:
        one = rig(server, second, timeout_s=4.0)
        one.check()
        second.faults = [lambda body: gate.wait(60) and FAULTS["500"]] * 1000
        for step in range(4):
            one.train(seed=step)
            one.engine.sync(one.policy)
            assert [len(group) for group in one.engine.generate(PROMPTS, SAMPLING)] == [3] * 4
            asked = len(second.asked)
            if step == 1:
                before = asked
        gate.set()
        assert asked == before, "it is not asked after two steps"
        assert [s.hangs for s in one.engine.fleet.servers] == [0, 2]


def test_a_request_that_hangs_is_given_up_and_sent_again(rig: Make, server: Loopback) -> None:
    one = rig(server, timeout_s=3.0)
    one.check()
    gate = threading.Event()

    def hang(body: dict[str, Any]) -> None:
        gate.wait(30)

    server.faults = [hang]
    groups = one.engine.generate(PROMPTS, SAMPLING)
    gate.set()
    assert [len(group) for group in groups] == [3] * 4


def test_a_refusal_is_not_sent_again(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    before = len(server.asked)
    with pytest.raises(RolloutError, match="maximum context length"):
        one.engine.generate(PROMPTS[:1], replace(SAMPLING, max_tokens=255))
    assert len(server.asked) - before == 1


@pytest.mark.slow
def test_a_server_that_restarts_in_the_middle_gets_the_adapter_again(rig: Make, server: Loopback) -> None:
    one = rig(server, wait_s=30.0)
    one.check()
    one.train()
    one.engine.sync(one.policy)
    calm = one.engine.generate(PROMPTS, SAMPLING)

    def restart(body: dict[str, Any]) -> bytes:
        def again() -> None:
            server.stop()
            server.start()

        threading.Thread(target=again).start()
        return b""

    server.faults = [restart]
    rough = one.engine.generate(PROMPTS, SAMPLING)
    assert [[c.text for c in group] for group in calm] == [[c.text for c in group] for group in rough]
    assert len([event for event in server.events if event.startswith("load")]) == 3


def test_a_server_that_forgot_its_adapter_is_given_it_again(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    server.adapters.clear()
    assert len(one.engine.generate(PROMPTS, SAMPLING)) == 4


@pytest.mark.slow
def test_one_of_two_servers_may_die_and_come_back(rig: Make, server: Loopback, model: Path) -> None:
    with Loopback(model) as second:
        one = rig(server, second)
        one.check()
        second.stop()
        assert [len(group) for group in one.engine.generate(PROMPTS, SAMPLING)] == [3] * 4
        one.train()
        one.engine.sync(one.policy)
        assert one.engine.fleet.servers[1].ready is False
        second.start()
        one.train(2)
        one.engine.sync(one.policy)
        assert list(second.adapters) == list(server.adapters)
        one.engine.shutdown()


def test_when_every_server_is_gone_the_call_ends_after_the_wait(rig: Make, server: Loopback) -> None:
    one = rig(server, wait_s=0.5)
    one.check()
    server.stop()
    with pytest.raises(RolloutError, match="no inference server is available after 1 s"):
        one.engine.generate(PROMPTS, SAMPLING)
    server.start()


# -- proof -------------------------------------------------------------------------------------------------------------


def test_the_newest_policy_is_proved(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    one.engine.generate(PROMPTS, SAMPLING)
    assert one.engine.metrics()["policy_proof"] is None, "a fresh adapter is the base model"
    one.train()
    one.engine.sync(one.policy)
    one.engine.generate(PROMPTS, SAMPLING)
    metrics = one.engine.metrics()
    assert metrics["policy_proof"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["mismatch_max"] < 1e-3  # type: ignore[operator]
    assert one.engine.metrics()["policy_proof"] is None, "asked again, there is nothing new"


@pytest.mark.parametrize("meaning", [*slow("sampled"), "raw"])
@pytest.mark.parametrize("swap", [*slow("the base model", "neither"), "the previous adapter"])
def test_an_adapter_swapped_behind_our_back_is_caught_at_once(
    rig: Make, server: Loopback, swap: str, meaning: str
) -> None:
    server.meaning = meaning
    one = rig(server)
    one.check()
    one.train(1)
    one.engine.sync(one.policy)
    server.adapters["previous"] = server.adapters[one.engine.adapter.name]  # type: ignore[union-attr]
    one.train(2)
    one.engine.sync(one.policy)
    one.engine.generate(PROMPTS, SAMPLING)
    foreign = {name: torch.randn_like(tensor) * 0.3 for name, tensor in server.adapters["previous"].items()}
    server.adapters["foreign"] = foreign
    names = {"the base model": server.name, "the previous adapter": "previous", "neither": "foreign"}
    server.serves_instead = names[swap]
    with pytest.raises(RolloutError, match=f"its log-probs are those of {swap}"):
        one.engine.generate(PROMPTS, SAMPLING)


# -- turns -------------------------------------------------------------------------------------------------------------


class Conversations:
    """Two turns each: the second prompt is the first with its completion."""

    def __init__(self, prompts: list[IntArray], sampling: Sampling) -> None:
        self.waiting = threading.Condition()
        self.pending: list[Turn] = []
        self.left = 2 * len(prompts)
        self.received: list[tuple[IntArray, Completion]] = []
        for prompt in prompts:
            self.put(prompt, sampling, last=False)

    def put(self, prompt: IntArray, sampling: Sampling, last: bool) -> None:
        answer: Future[Completion] = Future()

        def received(done: Future[Completion]) -> None:
            with self.waiting:
                if done.exception():
                    self.left -= 1 if last else 2
                else:
                    self.left -= 1
                    self.received.append((prompt, done.result()))
                    if not last:
                        longer = np.concatenate([prompt, done.result().token_ids_T])
                        self.put(longer, replace(sampling, seed=sampling.seed + 1), last=True)
                self.waiting.notify()

        answer.add_done_callback(received)
        self.pending.append(Turn(prompt, sampling, answer))

    def take(self, wait: bool) -> list[Turn]:
        with self.waiting:
            self.waiting.wait_for(lambda: self.pending or not self.left or not wait, timeout=30)
            taken, self.pending = self.pending, []
            return taken


@pytest.mark.parametrize("meaning", ["sampled", *slow("raw")])
@pytest.mark.slow
def test_turns_are_sampled_as_they_come(rig: Make, server: Loopback, meaning: str) -> None:
    server.meaning = meaning
    one = rig(server)
    one.check()
    one.train()
    one.engine.sync(one.policy)
    sampling = replace(SAMPLING, n=1)
    talk = Conversations(PROMPTS, sampling)
    one.engine.serve(talk)
    assert len(talk.received) == 8
    off = [ratios(one.policy, [prompt], [[completion]], sampling) for prompt, completion in talk.received]
    assert max(np.abs(ratio - 1).max() for ratio in off) < 0.02
    assert one.engine.metrics()["policy_proof"] == pytest.approx(1.0, abs=1e-3)


def test_a_turn_that_fails_says_so_and_so_does_the_engine(
    rig: Make, server: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.inference_engine.http.fleet.FIRST_PAUSE_S", 0.01)
    one = rig(server)
    one.check()
    server.faults = [lambda body: (500, {})] * 1000
    with pytest.raises(RolloutError, match="in 5 attempts"):
        one.engine.serve(Conversations(PROMPTS[:1], replace(SAMPLING, n=1)))


@pytest.mark.slow
@pytest.mark.parametrize("meaning", ["raw", *slow("sampled")])
def test_completions_are_delivered_as_they_arrive_and_are_the_same(rig: Make, server: Loopback, meaning: str) -> None:
    server.meaning = meaning
    one = rig(server)
    one.check()
    expected = one.engine.generate(PROMPTS, SAMPLING)
    released = threading.Event()
    server.faults = [lambda body: None if body["prompt"] != PROMPTS[1].tolist() else released.wait(20) and None] * 4
    delivered: dict[int, list[Completion]] = {}

    def deliver(at: int, completions: list[Completion]) -> None:
        assert threading.current_thread() is threading.main_thread()
        delivered[at] = completions
        if len(delivered) == 3:
            released.set()

    groups = one.engine.generate_each(PROMPTS, SAMPLING, deliver)
    assert list(delivered)[-1] == 1
    for at, (ours, theirs) in enumerate(zip(groups, expected, strict=True)):
        assert ours is delivered[at]
        for one_of_ours, one_of_theirs in zip(ours, theirs, strict=True):
            assert one_of_ours.text == one_of_theirs.text
            np.testing.assert_allclose(one_of_ours.logprobs_T, one_of_theirs.logprobs_T, atol=1e-4)
    assert one.engine.metrics()["mismatch_max"] is not None, "the server was verified"


def test_an_error_of_a_server_ends_a_call_that_delivers(rig: Make, server: Loopback) -> None:
    one = rig(server)
    one.check()
    server.faults = [lambda body: (400, {"error": "no"}) if len(body["prompt"]) == 9 else None] * 9
    with pytest.raises(RolloutError, match="did not complete a prompt of 9 tokens"):
        one.engine.generate_each(PROMPTS, SAMPLING, lambda at, completions: None)


@pytest.mark.parametrize("reply_after_s", [0.2, 1.5])
def test_an_interrupted_batch_of_turns_leaves_nothing_behind(
    rig: Make, server: Loopback, capfd: pytest.CaptureFixture[str], reply_after_s: float
) -> None:
    one = rig(server)
    sampling = Sampling(max_tokens=8, n=1, temperature=0.7, seed=3)
    one.check(sampling)
    server.delay_s = reply_after_s

    class Interrupted:
        taken = False

        def take(self, wait: bool) -> list[Turn]:
            if self.taken:
                time.sleep(0.4)
                raise KeyboardInterrupt
            self.taken = True
            return [Turn(prompt, sampling, Future()) for prompt in PROMPTS]

    with pytest.raises(KeyboardInterrupt):
        one.engine.serve(Interrupted())  # type: ignore[arg-type]
    one.engine.shutdown()
    gc.collect()
    assert capfd.readouterr().err == ""
