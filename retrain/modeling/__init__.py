"""Shared by learner and sampler: policy, attention, packing, log-probs, tokens, sampling."""
