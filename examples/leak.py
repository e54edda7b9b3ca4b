"""A regression whose memory grows: every validation loss is kept together with the graph that made it.

    python examples/leak.py --width 256 --batch 256 --steps 30

The cause is in `validate` and `main` together: the loss is computed with autograd on, and `history` keeps it. Either
`torch.no_grad()` around `validate` or `.item()` on what it returns would cure it.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_data(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points of shape (count, 8), and a smooth function of them of shape (count, 1)."""
    x = torch.rand(count, 8, generator=generator) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) + x[:, 1:2] * x[:, 2:3]


def validate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    loss = F.mse_loss(model(x), y)
    model.train()
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x, y = (t.to(args.device) for t in make_data(16 * args.batch, generator))
    x_held_out, y_held_out = (t.to(args.device) for t in make_data(2 * args.batch, generator))

    layers: list[nn.Module] = []
    for inputs in [8] + [args.width] * (args.layers - 1):
        layers += [nn.Linear(inputs, args.width), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(args.width, 1)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    history = []
    for step in range(args.steps):
        picked = torch.randint(len(x), (args.batch,), generator=generator).to(args.device)
        loss = F.mse_loss(model(x[picked]), y[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        validation = validate(model, x_held_out, y_held_out)
        history.append(validation)
        print(f"step {step} loss {loss.item():.6f} validation loss {validation.item():.6f}")
    print(f"best validation loss {min(h.item() for h in history):.6f}")


if __name__ == "__main__":
    main()
