"""The stand-in refuses what an accelerator refuses, and counts what costs time there."""

import pytest
import torch

from tests.device.stand_in import MixedDevicesError, counted

pytestmark = pytest.mark.usefixtures("standin")


def ours(*values, device="standin"):
    return torch.tensor(values, device=device)


REFUSED = {
    "sum": lambda: ours(1.0, 2.0) + torch.ones(2),
    "other device": lambda: ours(1.0) + ours(1.0, device="standin:1"),
    "result on the CPU": lambda: torch.zeros(2).add_(ours(1.0, 2.0)),
    "constant on the CPU": lambda: torch.tensor(0.0).add_(ours(1.0, 2.0).sum()),
    "rows of the CPU": lambda: torch.ones(3)[ours(0, 1)],
    "values of the CPU": lambda: ours(1.0, 2.0).index_put_((ours(0),), torch.ones(1)),
    "joined": lambda: torch.cat([ours(1.0), torch.ones(1)]),
    "stacked with a constant": lambda: torch.stack([ours(1.0).sum(), torch.tensor(1.0)]),
    "product": lambda: torch.ones(2, 2) @ torch.ones(2, 2, device="standin"),
    "generator": lambda: torch.rand(2, generator=torch.Generator(), device="standin"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_of_several_devices_are_refused(name):
    with pytest.raises(MixedDevicesError):
        REFUSED[name]()


def test_constants_and_indices_may_lie_on_the_cpu():
    x = ours(1.0, 2.0)
    assert (x + torch.tensor(1.0)).tolist() == [2.0, 3.0]
    assert x[torch.tensor([1])].tolist() == [2.0]
    assert torch.where(x > 1, torch.tensor(0.0), x).tolist() == [1.0, 0.0]


def test_results_lie_on_the_device():
    layer = torch.nn.Linear(3, 2).to("standin:1")
    y = layer(torch.ones(4, 3, device="standin:1"))
    y.sum().backward()
    assert {str(x.device) for x in (y, layer.weight, layer.weight.grad)} == {"standin:1"}
    assert torch.equal(layer.weight.grad.cpu(), torch.full((2, 3), 4.0))
    assert torch.arange(4, device="standin")[1].item() == 1
    assert y.to("standin:0").device.index == 0
    assert type(y.cpu()) is torch.Tensor


WAITING = {
    "number": lambda x: x.sum().item(),
    "condition": lambda x: bool((x > 0).all()),
    "comparison": lambda x: torch.equal(x, x),
    "list": lambda x: x.tolist(),
    "selection": lambda x: x[x > 1],
    "to the CPU": lambda x: x.cpu(),
    "from the CPU": lambda x: torch.ones(2).to("standin"),
}


@pytest.mark.parametrize("name", WAITING)
def test_synchronizations_are_counted(name):
    x = ours(1.0, 2.0)
    with counted() as counts:
        WAITING[name](x)
    assert counts.synchronizations.total() == 1


def test_launches_are_counted():
    x, y = ours(1.0, 2.0), torch.empty(2, device="standin")
    with counted() as counts:
        torch.mul(x.view(1, 2), 2.0).t().add_(1.0)
        y.masked_fill_(x > 1, 0.0)
    # Views launch nothing, and a fill by a mask does not wait.
    names = [name.removeprefix("aten::") for name in counts.launches]
    assert names == ["mul", "add_", "gt", "masked_fill_"]
    assert not counts.synchronizations


def test_no_device_is_left_behind(standin):
    assert torch.accelerator.is_available()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(torch.standin), "is_in_use", False)
        assert not torch.accelerator.is_available()
