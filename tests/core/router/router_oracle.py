"""Routing and balance by loops in float64, one token at a time: no top_k, no sort of arrays, no vector formulas."""

import math

import numpy as np

SCORES = {
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0, x)),
}


def best(values, count):
    """Indices of the greatest, of equals the lower first."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def chosen_experts(scores, config):
    """The choices of one token by its (biased) scores."""
    if config.num_groups is None:
        return best(scores, config.top_k)
    size = len(scores) // config.num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_groups)]
    best_of_group = config.group_best or config.top_k // config.group_topk
    totals = [
        sum(sorted((scores[e] for e in group), reverse=True)[:best_of_group]) for group in groups
    ]
    allowed = sorted(e for g in best(totals, config.group_topk) for e in groups[g])
    return [allowed[i] for i in best([scores[e] for e in allowed], config.top_k)]


def route_token(x, config, bias=None, forced=None):
    """Indices and weights of one token's logits."""
    if config.score_function != "softmax":
        s = SCORES[config.score_function](x)
        by = s if bias is None else s + bias
    else:
        s = by = softmax(x) if config.use_pre_softmax else x
        by = by if bias is None else softmax(x) + bias
    idx = list(chosen_experts(by, config) if forced is None else forced)
    idx = [e if 0 <= e < len(x) else -1 for e in idx]
    live = [k for k, e in enumerate(idx) if e >= 0]
    weights = np.zeros(len(idx))
    if live:
        picked = np.array([s[idx[k]] for k in live])
        if config.score_function == "softmax":
            picked = picked if config.use_pre_softmax else softmax(picked)
        elif config.normalize or config.normalize is None and config.top_k > 1:
            picked = picked / picked.sum()
        weights[live] = picked * config.scaling_factor
    return idx, weights


def route(logits, config, bias=None, mask=None, forced=None):
    """int32[..., K] and float64[..., K]."""
    tokens = logits.shape[:-1]
    idx = np.full((*tokens, config.top_k), -1, np.int32)
    weights = np.zeros((*tokens, config.top_k))
    for t in np.ndindex(*tokens):
        if mask is None or mask[t]:
            given = None if forced is None else forced[t]
            idx[t], weights[t] = route_token(logits[t].astype(np.float64), config, bias, given)
    return idx, weights


def normalised(x, score_function):
    """Scores of one token, summing to 1 over all experts."""
    if score_function == "softmax":
        return softmax(x)
    s = SCORES[score_function](x)
    return s / s.sum()


def balance(logits, idx, coeff, score_function="softmax", mask=None, counts=None):
    """coeff * E * sum_e mean probability * share of the choices, token by token."""
    E, K = logits.shape[-1], idx.shape[-1]
    live = [t for t in np.ndindex(*logits.shape[:-1]) if mask is None or mask[t]]
    if not live:
        return np.float64(0)
    mean = sum(normalised(logits[t].astype(np.float64), score_function) for t in live) / len(live)
    if counts is None:
        counts = np.zeros(E)
        for t in live:
            for e in idx[t]:
                if 0 <= e < E:
                    counts[e] += 1
    return np.float64(coeff * E * sum(mean[e] * counts[e] / (len(live) * K) for e in range(E)))


def sequence_balance(logits, idx, coeff, score_function="softmax", mask=None):
    """The mean of each sequence's own loss."""
    sequences = list(np.ndindex(*logits.shape[:-2]))
    each = [
        balance(logits[s], idx[s], coeff, score_function, None if mask is None else mask[s])
        for s in sequences
    ]
    return np.float64(math.fsum(each) / max(len(sequences), 1))


def needed_bias(s, bias, top_k):
    """The bias with which each expert of one token draws level, by asking for the K-th best of the others."""
    biased = s + bias
    others = [np.delete(biased, e) for e in range(len(s))]
    return np.array([sorted(o, reverse=True)[top_k - 1] for o in others]) - s


def histogram(logits, bias, config, num_bins, bias_range, mask=None):
    """int[E, B] by np.histogram of the clipped needs."""
    E, (low, high) = logits.shape[-1], bias_range
    live = [t for t in np.ndindex(*logits.shape[:-1]) if mask is None or mask[t]]
    score = SCORES[config.score_function]
    needs = [needed_bias(score(logits[t].astype(np.float64)), bias, config.top_k) for t in live]
    needs = np.clip(np.array(needs).reshape(-1, E), low, high)
    return np.stack([np.histogram(needs[:, e], num_bins, bias_range)[0] for e in range(E)])
