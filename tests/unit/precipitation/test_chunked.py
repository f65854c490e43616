"""Losses chunk by chunk against the same losses in one piece."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfs_trt.precipitation.chunked import chunked_losses
from mfs_trt.precipitation.losses import exit_losses
from trainings import training_config


def _case(rows: int, vocab: int = 13, width: int = 6):
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden = [draw(rows, width), draw(rows, width)]
    heads = [draw(vocab, width), draw(vocab, width)]
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    return hidden, heads, labels


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25), st.sampled_from([0.0, 0.5]))
def test_chunks_of_any_size_give_the_loss_and_gradients_of_the_whole(rows, chunk, distill):
    config = training_config(distill_weight=distill)
    hidden, heads, labels = _case(rows)
    weights = [0.7, 1.0]

    def losses_of(chunks, first, last):
        logits = [x @ head.T for x, head in zip(chunks, heads, strict=True)]
        return exit_losses(config, logits, labels[first:last])

    total, losses = chunked_losses(losses_of, hidden, weights, heads, chunk)
    found = torch.autograd.grad(3 * total, [*hidden, *heads])
    whole = losses_of(hidden, 0, rows)
    wanted = torch.autograd.grad(3 * (whole @ torch.tensor(weights).double()), [*hidden, *heads])
    torch.testing.assert_close(losses, whole.detach())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_no_rows_are_no_loss_and_no_gradient():
    hidden, heads, labels = _case(1)
    empty = [h[:0] for h in hidden]
    total, losses = chunked_losses(lambda *_: pytest.fail("no chunk"), empty, [1, 1], heads, 4)
    assert float(total.detach()) == 0 and losses.tolist() == [0, 0]


def test_at_no_time_do_the_logits_of_more_than_one_chunk_exist():
    hidden, heads, labels = _case(64)
    alive: list[int] = []
    made = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            import weakref

            made.append(weakref.ref(logits))
            alive.append(sum(ref() is not None for ref in made))
            return logits.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    def losses_of(chunks, first, last):
        logits = [Watched.apply(x @ h.T) for x, h in zip(chunks, heads, strict=True)]
        return exit_losses(training_config(), logits, labels[first:last])

    total, _ = chunked_losses(losses_of, hidden, [1.0, 1.0], heads, 8)
    total.backward()
    assert len(made) == 16 and max(alive) <= 2
