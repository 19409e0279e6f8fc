"""A runner on a CPU that hides tokens as a GPU does: whoever needs the next one before it is known
gets it from the decode before, and from nowhere else."""

import numpy as np
import torch

from billfish.engine.runner import Decoded, TorchRunner


def drawn(logits, rule):
    """What a Rule means, in fp64 and in plain words."""
    heat, deepest, _, top_p = map(float, rule.view(np.float32)[:4])
    x = logits.double().numpy()
    depth = (x.max() - x) * heat
    if heat == 0:
        return int(x.argmax())
    order = np.lexsort((np.arange(len(x)), depth))  # the best first, of equals the lowest id
    order = order[depth[order] <= deepest][: int(rule[2]) or None]
    sums = np.cumsum(2 ** -depth[order])
    if top_p < 1:
        order = order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1]
    order.sort()
    sums = np.cumsum(2 ** -depth[order])
    number = int(rule[4:6].view(np.uint64)[0]) / 2**52
    return int(order[np.searchsorted(sums, number * sums[-1], side="right")])


class Ahead(TorchRunner):
    asynchronous = True

    def __init__(self, inner):
        self.decoder, self.page_tokens = inner.decoder, inner.page_tokens
        self.attention, self.found, self.promised = inner.attention, None, 0

    def tokens(self, piece):
        given = super().tokens(piece)
        self.promised += sum(token < 0 for token in given)
        return [token if token >= 0 else int(self.found[-1 - token, 0]) for token in given]

    def run(self, pieces, rules=None):
        logits = super().run(pieces).logits
        if rules is None:
            return Decoded(logits)
        tokens = torch.tensor(list(map(drawn, logits, rules)), dtype=torch.int32)
        self.found = torch.stack((tokens, logits.amax(-1).view(torch.int32)), 1)

        class Now:
            def synchronize(self):
                pass

        return Decoded(logits, self.found.clone(), Now())
