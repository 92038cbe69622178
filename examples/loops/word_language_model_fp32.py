"""A word language model: an LSTM whose hidden state is carried from batch to batch, with clipping, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, BATCH, LENGTH = 16, 16, 6
Hidden = tuple[Tensor, Tensor]


def make_text(count: int) -> Tensor:
    """Return word numbers (count, BATCH): each word is most often the sum of the two before it."""
    words = [*torch.randint(WORDS, (2, BATCH))]
    for _ in range(count - 2):
        likely = (words[-1] + words[-2]) % WORDS
        words.append(torch.where(torch.rand(BATCH) < 0.8, likely, torch.randint(WORDS, (BATCH,))))
    return torch.stack(words)


class Model(nn.Module):
    """Embedding, LSTM and a linear layer to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(WORDS, 32), nn.LSTM(32, 64), nn.Linear(64, WORDS)

    def forward(self, words: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
        """Map words (length, batch) and the state before them to logits of the next ones and the state after them."""
        out, hidden = self.lstm(self.embed(words), hidden)
        return self.head(out), hidden


def parts(text: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return consecutive pieces of `text` and, for each of their words, the next one."""
    return [(text[at : at + LENGTH], text[at + 1 : at + LENGTH + 1]) for at in range(0, len(text) - LENGTH, LENGTH)]


def loss_fn(model: nn.Module, words: Tensor, following: Tensor, hidden: Hidden | None) -> tuple[Tensor, Hidden]:
    """Return the cross entropy of the following words, and the hidden state."""
    logits, hidden = model(words, hidden)
    return F.cross_entropy(logits.flatten(0, 1), following.flatten()), hidden


def evaluate(model: nn.Module, text: Tensor) -> float:
    """Return the mean cross entropy over `text`."""
    hidden, losses = None, []
    model.eval()
    with torch.no_grad():
        for words, following in parts(text):
            loss, hidden = loss_fn(model, words, following, hidden)
            losses.append(float(loss))
    model.train()
    return sum(losses) / len(losses)


def main(seed: int = 0) -> float:
    """Train for a few epochs; return the cross entropy on another text (nats a word; chance is 2.77)."""
    torch.manual_seed(seed)
    text, other = make_text(361), make_text(121)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(3):
        hidden = None
        for words, following in parts(text):
            optimizer.zero_grad()
            loss, hidden = loss_fn(model, words, following, hidden)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            hidden = (hidden[0].detach(), hidden[1].detach())
        print(f"epoch {epoch}: {loss:.3f}, on the other text {evaluate(model, other):.3f}")
    return evaluate(model, other)


if __name__ == "__main__":
    print(f"cross entropy {main():.4f}")
