"""What the learner and the sampler share: policy, attention, packing, log-probs, tokens, sampling."""
