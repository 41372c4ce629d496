"""Device memory of the simulated runtime: out of the host's reach, accounted, checked."""

import signal

import pytest
import torch


def test_host_cannot_read_device_memory(run_script):
    done = run_script(
        """
        import ctypes, torch, torch_npu
        x = torch.ones(4, device="npu")
        torch.npu.synchronize()
        print("value", ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])
        """
    )
    assert done.returncode == -signal.SIGSEGV
    assert "the host read or wrote device memory directly" in done.stderr
    assert "value" not in done.stdout


def test_fresh_memory_is_poisoned(run_script):
    done = run_script(
        """
        import torch, torch_npu
        print(torch.empty(3, device="npu").cpu().isnan().all().item())
        """
    )
    assert done.stdout.strip() == "True", done.stderr


def test_bytes_are_accounted(npu, runtime):
    torch.npu.empty_cache()
    before = runtime.report()["device_bytes"][0]
    block = torch.empty(64 << 20, dtype=torch.uint8, device="npu")
    assert runtime.report()["device_bytes"][0] >= before + (64 << 20)
    del block
    torch.npu.synchronize()
    torch.npu.empty_cache()
    assert runtime.report()["device_bytes"][0] == before


def test_out_of_memory_is_an_error(npu, runtime):
    with pytest.raises(RuntimeError, match=r"[Oo]ut of memory|no .* bytes in one piece"):
        torch.empty(8 << 30, dtype=torch.uint8, device="npu")


def test_devices_have_memory_of_their_own(npu, runtime):
    a = torch.arange(5.0, device="npu:0")
    b = a.to("npu:1")
    a.fill_(-1)
    torch.npu.synchronize()
    assert b.cpu().tolist() == [0, 1, 2, 3, 4]
    assert b.device.index == 1
    assert (b + 1).cpu().tolist() == [1, 2, 3, 4, 5]
    npu.npu.set_device(0)


def test_tensor_of_another_device_is_refused(run_script):
    done = run_script(
        """
        import torch, torch_npu
        a, b = torch.ones(4, device="npu:0"), torch.ones(4, device="npu:1")
        a.add_(torch_npu._C._weak_ref_tensor(b).view(4)) if False else torch.add(a, b, out=a)
        torch.npu.synchronize()
        """,
        devices=2,
        TASK_QUEUE_ENABLE=0,
    )
    assert done.returncode != 0
    assert "device" in done.stderr
