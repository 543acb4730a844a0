"""Checks before training: servers are up, serve the model, return token ids and log-probs, and load adapters.

Each failure is one sentence with the server flag that fixes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from retrain.errors import ConfigError, RolloutError
from retrain.inference_engine.http.client import RequestRejected, Transient
from retrain.inference_engine.http.fleet import Fleet, LaunchedServerExited, NoServerAvailable, Server
from retrain.inference_engine.http.identity import PROBE, Identification
from retrain.inference_engine.http.proof import PolicyScorer, Row
from retrain.inference_engine.http.spec import CompletionRequest, CompletionResult, IncompleteReply, ServerSpec
from retrain.modeling.tokens import Tokenizer
from retrain.types import IntArray, Sampling

PROBE_TOKENS, PROBE_ROWS = 24, 4
# Mean log-prob difference beyond which a server has another model, by the trainer's precision.
LIMITS = {torch.float32: 0.05}
LIMIT = 0.15


MEANINGS: dict[str, Callable[[Sampling], Sampling]] = {
    "sampled": lambda s: s,
    "tempered": lambda s: replace(s, top_p=1.0, top_k=0, min_p=0.0),
    "untempered": lambda s: Sampling(max_tokens=s.max_tokens, repetition_penalty=s.repetition_penalty),
    "raw": lambda s: Sampling(max_tokens=s.max_tokens),
}
"""Distributions that a server's log-probs may describe: the sampled one, or one before a stage of the sampler."""


@dataclass(frozen=True)
class Survey:
    """Measured properties of the servers."""

    context: int
    takes_n: bool = True
    meaning: str = "sampled"
    mismatch: float = 0.0
    """Mean difference from the trainer's log-probs under the base model."""

    def reported(self, sampling: Sampling) -> Sampling:
        """The distribution that the servers' log-probs describe, given the sampled one."""
        return replace(MEANINGS[self.meaning](sampling), n=1, seed=0)


class Startup(Identification):
    """Surveys every server once."""

    def __init__(
        self,
        spec: ServerSpec,
        fleet: Fleet,
        tokenizer: Tokenizer,
        scorer: PolicyScorer,
        prompt_text: Callable[[IntArray], str],
    ) -> None:
        wanted = str(scorer.policy.peft.peft_config["default"].base_model_name_or_path)
        super().__init__(spec, fleet, tokenizer, wanted, scorer.policy.rank)
        self.scorer, self.prompt_text = scorer, prompt_text

    def survey(self, sampling: Sampling, log: Callable[[str], None]) -> Survey:
        """Survey all servers; raises if one is unsuitable or they differ."""
        found: list[Survey] = []
        for server in self.fleet.servers:
            one = self._survey(server, sampling, log)
            if found and one.meaning != found[0].meaning:
                raise ConfigError(
                    f"{server.url} and {self.fleet.servers[0].url} report log-probs differently "
                    f"({one.meaning} and {found[0].meaning}); start both with the same flags."
                )
            found.append(one)
        return Survey(
            context=min(one.context for one in found),
            takes_n=all(one.takes_n for one in found),
            meaning=found[0].meaning,
            mismatch=max(one.mismatch for one in found),
        )

    def check_adapters(self, deliver: Callable[[object], None]) -> None:
        """Load an adapter and sample from it once on every server."""
        try:
            deliver(self.scorer.policy)
            absent = [server for server in self.fleet.servers if not server.ready]
            if absent:
                raise self._failed(absent[0], absent[0].trouble)
            for server in self.fleet.servers:
                self._run(self.fleet.send_patiently(server, self._probe(Sampling(max_tokens=2))))
        except LaunchedServerExited:
            raise
        except Transient as error:
            self.fleet.raise_if_exited()
            if error.down or error.status or isinstance(error.__cause__, TimeoutError):
                raise self._failed(server, str(error)) from error
            raise self._unsuitable(server, "does not sample from adapters", error, "lora") from error
        except (RequestRejected, IncompleteReply) as error:
            raise self._unsuitable(server, "does not sample from adapters", error, "lora") from error
        except NoServerAvailable as error:
            raise self._failed(self.fleet.servers[0], self.fleet.servers[0].trouble) from error
        except RolloutError as error:
            rejection = error.__cause__
            if isinstance(rejection, RequestRejected) and rejection.status in (401, 403):
                raise self._bad_api_key(self.fleet.servers[0], rejection) from error
            too_high = "rank" in str(error).lower()
            raise ConfigError(f"{error}  {self._remedy('rank' if too_high else 'lora')}") from error

    def _survey(self, server: Server, sampling: Sampling, log: Callable[[str], None]) -> Survey:
        listed = self.identify(server, sampling.max_tokens, log)
        context = min(self.scorer.policy.context_length, listed or self.scorer.policy.context_length)
        takes_n, drawn, probe = self._draw(server, context)
        meaning, mismatch = self._measure(server, drawn, probe)
        one = Survey(context, takes_n, meaning, mismatch)
        log(f"Inference server {server.url}: {self.spec.name}, model {server.model}, context {context}.")
        if one.reported(sampling) != replace(sampling, n=1, seed=0):
            flag = self.spec.remedies.get("processed")
            hint = f"; {flag} on the server avoids that" if flag else ""
            log(f"  It reports {meaning} log-probs: those of the sampled distribution are recomputed here{hint}.")
        return one

    def _draw(self, server: Server, context: int) -> tuple[bool, list[CompletionResult], CompletionRequest]:
        """Completions of a fixed prompt, and whether the server supports `n`."""
        options = {"top_p": 0.8, "repetition_penalty": 1.3}
        own = {option: value for option, value in options.items() if option in self.spec.options}
        sampling = Sampling(max_tokens=1, n=PROBE_ROWS, temperature=0.5, seed=1, **own)  # type: ignore[arg-type]
        room = max(1, min(PROBE_TOKENS, context - len(self._probe(sampling).prompt_ids)))
        probe = self._probe(sampling := replace(sampling, max_tokens=room))
        alone = [replace(probe, sampling=replace(sampling, n=1, seed=seed)) for seed in range(1, PROBE_ROWS + 1)]
        try:
            if self.spec.takes_n:
                try:
                    return True, self._run(self.fleet.send_patiently(server, probe)), probe
                except Transient as error:
                    if not str(error).startswith(f"it sent 1 of {PROBE_ROWS}"):
                        raise
            return False, [self._run(self.fleet.send_patiently(server, one))[0] for one in alone], probe
        except IncompleteReply as error:
            miss = "ids" if "ids" in error.what else "logprobs"
            raise self._unsuitable(server, "cannot be used for training", error, miss) from error
        except RequestRejected as error:
            if error.status in (401, 403):
                raise self._bad_api_key(server, error) from error
            raise self._unsuitable(server, "does not complete token ids with log-probs", error, "ids") from error
        except Transient as error:
            raise self._unsuitable(server, "did not complete a first prompt", error, "") from error

    def _measure(self, server: Server, drawn: list[CompletionResult], probe: CompletionRequest) -> tuple[str, float]:
        """Which distribution the log-probs describe, and their mean difference from the trainer's."""
        rows = [Row(probe.prompt_ids, np.array(a.token_ids, np.int64), np.array(a.logprobs, np.float32)) for a in drawn]
        server_T = np.concatenate([row.logprobs_T for row in rows])
        gaps = {}
        with self.scorer.using(self.scorer.base()):
            for name, of in MEANINGS.items():
                own = np.concatenate(self.scorer.logprobs(rows, replace(of(probe.sampling), n=1)))
                gaps[name] = float(np.abs(own - server_T).mean())
        meaning, mismatch = min(gaps.items(), key=lambda item: item[1])
        if mismatch > LIMITS.get(self.scorer.policy.dtype, LIMIT):
            raise ConfigError(
                f"{server.url} serves {server.model!r}, which differs from the trainer's {self.wanted!r}: on a fixed "
                f"prompt their log-probs differ by {mismatch:.2f} on average.  Try: {self._command(server)}"
            )
        return meaning, mismatch

    def _probe(self, sampling: Sampling) -> CompletionRequest:
        ids = np.array(self.tokenizer(PROBE)["input_ids"], np.int64)
        return CompletionRequest(ids, self.prompt_text(ids), sampling, self.scorer.policy.stop_ids)

    def _unsuitable(self, server: Server, what: str, error: Exception, miss: str) -> ConfigError:
        return ConfigError(f"{server.url} {what}: {str(error).rstrip('.')}.  {self._remedy(miss)}".rstrip())

    def _failed(self, server: Server, trouble: str) -> ConfigError:
        # vLLM reports a rank that is too high as error 500.
        hint = self._remedy("rank") if "rank" in trouble.lower() else "Try: check its log, start it again"
        reason = trouble.rstrip(".")
        return ConfigError(
            f"{server.url} responded before, but failed when it loaded its first adapter: {reason}.  {hint}"
        )
