# ruff: noqa: D101, D102, I001, UP008
# mypy: ignore-errors
# fmt: off
"""The LeNet-5 of MindSpore's tutorial "Mixed Precision", section "Automatic Mixed Precision", on PyTorch.

The code between the lines is the document's. Changed: the import lines (the document prints one of them and leaves the
others to the reader), and two things without which it runs nowhere: ``nn.MaxPool2d(kernel_size=2)`` has stride 1 in
MindSpore too and then fc1 does not fit, so ``stride=2`` is added; ``inputs`` is not defined, ``predict`` is meant.
The three lines at the top are there because style, annotations and quotes are the document's.
"""

import numpy as np

from halfstep.compat.mindspore import Tensor, nn
from halfstep.compat.mindspore.common import dtype as mstype
from halfstep.compat.mindspore.nn import Momentum, MSELoss, WithLossCell
from halfstep.compat.mindspore.ops import operations as P

# ---------------------------------------------------------------------------------------------------------------------
# The interface of Auto_mixed precision
from halfstep.compat.mindspore.train import amp

# Define network
class LeNet5(nn.Cell):
    def __init__(self):
        super(LeNet5, self).__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode='valid')
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode='valid')
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, 10)
        self.relu = nn.ReLU()
        self.max_pool2d = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = P.Flatten()

    def construct(self, x):
        x = self.max_pool2d(self.relu(self.conv1(x)))
        x = self.max_pool2d(self.relu(self.conv2(x)))
        x = self.flatten(x)
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        x = self.fc3(x)
        return x

# Initialize network
net = LeNet5()

# Define training data, label and sens
predict = Tensor(np.ones([1, 1, 32, 32]).astype(np.float32) * 0.01)
label = Tensor(np.zeros([1, 10]).astype(np.float32))
scaling_sens = Tensor(np.full((1), 1.0), dtype=mstype.float32)

# Define Loss and Optimizer
net.set_train()
loss = MSELoss()
optimizer = Momentum(params=net.trainable_params(), learning_rate=0.1, momentum=0.9)
net_with_loss = WithLossCell(net, loss)
train_network = amp.build_train_network(net_with_loss, optimizer, level="O2")

# Run training
output = train_network(predict, label, scaling_sens)

# ---------------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    loss_value, overflow, scale = output
    print(f"loss {float(loss_value):.6f}, overflow {bool(overflow)}, scale {float(scale):g}")
