#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
const c10::Device kDevice(c10::DeviceType::CUDA, 0);

// What autograd needs: a device to switch to and a stream to wait for.
struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
};

struct FakeHooks : at::CUDAHooksInterface {
  explicit FakeHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
};

// The kernel scaled_dot_product_attention takes on a GPU: flash for low formats without a mask, else memory-efficient.
int64_t attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask,
                  double, bool, std::optional<double>, bool) {
  const bool low = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (query.scalar_type() == at::kDouble) return static_cast<int64_t>(sdp::SDPBackend::math);
  const bool flash = low && !(mask.has_value() && mask->defined());
  return static_cast<int64_t>(flash ? sdp::SDPBackend::flash_attention : sdp::SDPBackend::efficient_attention);
}
}  // namespace

// Called after torch has been imported: a torch built for CUDA registers its own guard and kernels when it is loaded.
extern "C" void halfstep_fake_cuda() {
  static Guard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention);
}

namespace at {
using ::FakeHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeHooks)
}  // namespace at
