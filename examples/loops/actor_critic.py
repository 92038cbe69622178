"""Actor and critic on a small game: a TrainStep each; the by-product of one, the advantage, goes to the other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

import halfstep as hs

GAMES, MOVES, DISCOUNT = 32, 12, 0.9


class Chase:
    """GAMES games at once: a player on a line moves left, not at all or right, and is paid for being near a target."""

    def reset(self) -> Tensor:
        """Begin anew; return the states (GAMES, 2): places of player and target."""
        self.player, self.target = torch.randn(GAMES), torch.randn(GAMES)
        return torch.stack([self.player, self.target], dim=1)

    def move(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Move by -0.5, 0 or 0.5 for the actions 0, 1 and 2; return the states and the rewards (GAMES,)."""
        self.player = self.player + 0.5 * (actions - 1)
        return torch.stack([self.player, self.target], dim=1), -(self.player - self.target).abs()


def mlp(outputs: int) -> nn.Module:
    """Return a network of the state with one hidden layer."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, outputs))


def play(game: Chase, actor: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Play MOVES moves; return states (MOVES, GAMES, 2), actions and rewards (MOVES, GAMES)."""
    state, seen = game.reset(), []
    with torch.no_grad():
        for _ in range(MOVES):
            action = Categorical(logits=actor(state)).sample()
            following, reward = game.move(action)
            seen.append((state, action, reward))
            state = following
    states, actions, rewards = map(torch.stack, zip(*seen, strict=True))
    return states, actions, rewards


def discounted(rewards: Tensor) -> Tensor:
    """Return the discounted sums of the rewards from each move on."""
    returns = [rewards[-1]]
    for reward in rewards[:-1].flip(0):
        returns.append(reward + DISCOUNT * returns[-1])
    return torch.stack(returns[::-1])


def loss_c(critic: nn.Module, states: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the critic's loss, and the advantage: how much better the moves were than it had thought."""
    values = critic(states).squeeze(-1)
    return F.smooth_l1_loss(values, returns), returns - values


def loss_a(actor: nn.Module, states: Tensor, actions: Tensor, advantage: Tensor) -> Tensor:
    """Return the actor's loss."""
    chances = Categorical(logits=actor(states))
    gain: Tensor = (chances.log_prob(actions) * advantage).mean() + 0.01 * chances.entropy().mean()
    return -gain


def main(seed: int = 0, policy: hs.Policy | str = "mixed") -> float:
    """Train for 60 rounds; return the mean reward of the last ten."""
    torch.manual_seed(seed)
    game, actor, critic = Chase(), mlp(3), mlp(1)
    optimizer_a = torch.optim.Adam(actor.parameters(), lr=1e-2)
    optimizer_c = torch.optim.Adam(critic.parameters(), lr=1e-2)
    step_c = hs.TrainStep(critic, optimizer_c, loss_c, policy=policy)
    step_a = hs.TrainStep(actor, optimizer_a, loss_a, policy=policy)
    scores = []
    for round_ in range(60):
        states, actions, rewards = play(game, actor)
        judged = step_c(states, discounted(rewards))
        step_a(states, actions, judged.aux)
        scores.append(float(rewards.mean()))
        if round_ % 10 == 0:
            print(f"{round_:4}: reward {scores[-1]:.3f}, critic {judged.loss:.3f}")
    return sum(scores[-10:]) / 10


if __name__ == "__main__":
    print(f"reward {main():.4f}")
