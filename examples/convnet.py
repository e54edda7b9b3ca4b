"""A small residual network that learns to tell where the bright spot of a noisy image is.

    python examples/convnet.py --width 32 --batch 32 --size 32 --epochs 3

Images are made on the spot: noise, with a spot in one of the four quarters, which is the label.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width, width),
        Residual(width, 2 * width, stride=2),
        Residual(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * width, 4),
    )


def make_images(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of shape (count, 3, size, size), and the quarter that holds the spot, 0 to 3."""
    half, spot = size // 2, max(size // 8, 1)
    quarters = torch.randint(4, (count,), generator=generator)
    offsets = torch.randint(half - spot + 1, (count, 2), generator=generator)
    images = torch.randn(count, 3, size, size, generator=generator)
    for image, quarter, (y, x) in zip(images, quarters.tolist(), offsets.tolist(), strict=True):
        top, left = y + half * (quarter // 2), x + half * (quarter % 2)
        image[:, top : top + spot, left : left + spot] += 2.0
    return images, quarters


def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch: int) -> tuple[float, float]:
    """Mean loss and accuracy."""
    model.eval()
    loss, right = 0.0, 0
    with torch.no_grad():
        for x, y in zip(images.split(batch), labels.split(batch), strict=True):
            logits = model(x)
            loss += F.cross_entropy(logits, y, reduction="sum").item()
            right += int((logits.argmax(1) == y).sum())
    model.train()
    return loss / len(labels), right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32, help="height and width of an image")
    parser.add_argument("--images", type=int, default=320, help="training images in an epoch")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.size < 8:
        parser.error("--size must be at least 8: the network halves the image twice")

    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    images, labels = (t.to(args.device) for t in make_images(args.images, args.size, generator))
    held_out = tuple(t.to(args.device) for t in make_images(128, args.size, generator))

    model = resnet(args.width).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        order = torch.randperm(args.images, generator=generator).to(args.device)
        for step, picked in enumerate(order.split(args.batch)):
            loss = F.cross_entropy(model(images[picked]), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} step {step} loss {loss.item():.6f}")
        validation, accuracy = evaluate(model, *held_out, args.batch)
        print(f"epoch {epoch} validation loss {validation:.6f} accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
