// Lets a CPU build of torch hold fake tensors "on" one CUDA device and run autograd over them. Nothing is computed: the
// device guard switches nothing, every event has happened, and the hooks say that CUDA is there.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device DEVICE(c10::DeviceType::CUDA, 0);

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  // the base class answers with device -1, which the autograd engine takes for "no such device"
  c10::Device getDevice() const override { return DEVICE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
};

// torch looks it up by this name
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneDevice)

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
} // namespace at
