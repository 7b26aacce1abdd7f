"""A graph network of PyTorch Geometric whose nodes take the maximum over their neighbours."""

import argparse

import torch
from torch import nn
from torch_geometric.nn import SAGEConv

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--nodes", type=int, default=5000)
parser.add_argument("--width", type=int, default=128)
options = parser.parse_args()


class Network(nn.Module):
    def __init__(self, features, width, classes):
        super().__init__()
        self.first = SAGEConv(features, width, aggr="max")
        self.second = SAGEConv(width, width, aggr="max")
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x, edges):
        x = self.first(x, edges).relu()
        x = self.norm(self.second(x, edges)).relu()
        return self.head(x)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
# A synthetic graph: the class of a node is that of its largest feature among all neighbours. Put your graph here.
x = torch.randn(options.nodes, 32, device=device)
edges = torch.randint(options.nodes, (2, 6 * options.nodes), device=device)
largest = torch.full_like(x, -torch.inf).index_reduce_(0, edges[1], x[edges[0]], "amax")
labels = largest[:, :8].argmax(1)

model = Network(32, options.width, 8).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

losses = []
for _ in range(options.steps):
    loss = nn.functional.cross_entropy(model(x, edges), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {handle.report().ratio:.1f}")
