// A device of torch's PrivateUse1 kind whose memory and arithmetic are the host's: see host_device.py.
//
// An operator runs as the CPU's kernel on tensors over the same bytes, so its result has the bits of the CPU's.
// Tensors, storages, autograd, autocast and generators are torch's own for a device of another kind.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>

namespace at::autocast {  // of ATen/autocast_mode.h
TORCH_API Tensor cached_cast(at::ScalarType, const Tensor&, c10::DeviceType);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType);
}  // namespace at::autocast

namespace {
using at::Tensor;
using c10::IValue;
constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 0);

// ---------------------------------------------------------------------------------------------- memory

void drop(void* owner) { delete static_cast<c10::Storage*>(owner); }

// A pointer to the bytes of `storage`, which lives as long as the pointer.
c10::DataPtr shared(const c10::Storage& storage, c10::Device device) {
  return {storage.mutable_data(), new c10::Storage(storage), &drop, device};
}

struct HostMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto made = c10::GetCPUAllocator()->allocate(bytes);
    auto* data = made.get();
    auto deleter = made.get_deleter();
    return {data, made.release_context(), deleter, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
HostMemory memory;

// ---------------------------------------------------------------------------------------------- random numbers

// torch's CPU kernels refuse a generator of another device, so this one passes the host's generator to them.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator host)
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override { return new Generator(host.clone()); }
  mutable at::Generator host;
};

at::Generator new_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

const at::Generator& default_generator() {
  static const at::Generator only = new_generator();
  return only;
}

// ---------------------------------------------------------------------------------------------- operators

const c10::Type& without_optional(const c10::Type& type) {
  const auto* optional = type.castRaw<c10::OptionalType>();
  return optional ? *optional->getElementType() : type;
}

bool is_generator(const c10::Type& type) { return without_optional(type).kind() == c10::TypeKind::GeneratorType; }

bool takes_generator(const std::vector<c10::Argument>& arguments) {
  return std::any_of(arguments.begin(), arguments.end(), [](const auto& each) { return is_generator(*each.type()); });
}

// The tensors of one call, over the same bytes as tensors of the CPU.
class Host {
 public:
  Tensor of(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kKind) return tensor;
    auto* key = tensor.unsafeGetTensorImpl();
    if (auto found = aliases_.find(key); found != aliases_.end()) return found->second.alias;
    TORCH_CHECK(tensor.layout() == at::kStrided, "the host device has no ", tensor.layout(), " tensors");
    const auto& storage = tensor.storage();
    auto [place, _] = storages_.try_emplace(
        storage.unsafeGetStorageImpl(),
        c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), shared(storage, at::kCPU), &memory, true));
    auto alias = over(place->second, tensor, c10::DispatchKeySet(c10::DispatchKey::CPU));
    aliases_.emplace(key, Pair{tensor, alias});
    return alias;
  }

  IValue of(const IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isList() && holds_tensors(*argument.type())) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        const IValue item = list.get(i);
        if (item.isTensor()) list.set(i, of(item.toTensor()));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kKind) return at::Device(at::kCPU);
    if (is_generator(*argument.type())) {
      auto given = value.isNone() ? default_generator() : value.toGenerator();
      return given.device().type() == kKind ? given.get<Generator>()->host : given;
    }
    return value;
  }

  // The tensor of this device for one that the CPU's kernel returned: an argument, a view of one, or a new one.
  Tensor back(const Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [_, pair] : aliases_)
      if (pair.alias.is_same(tensor)) return pair.original;
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    for (const auto& [_, pair] : aliases_)
      if (pair.alias.storage().is_alias_of(tensor.storage())) return over(pair.original.storage(), tensor, keys);
    const auto& made = tensor.storage();
    return over({c10::Storage::use_byte_size_t(), made.nbytes(), shared(made, kDevice), &memory, true}, tensor, keys);
  }

  IValue back(const IValue& value) const {
    if (value.isTensor()) return back(value.toTensor());
    if (!value.isTensorList()) return value;
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, back(list.get(i)));
    return list;
  }

  // What a kernel that resizes its output did to the alias is done to the tensor.
  void resize() const {
    for (const auto& [_, pair] : aliases_) {
      auto* impl = pair.original.unsafeGetTensorImpl();
      auto& from = pair.alias.storage();
      auto& to = impl->unsafe_storage();
      if (from.data() != to.data()) {
        to.set_nbytes(from.nbytes());
        to.set_data_ptr_noswap(shared(from, kDevice));
      }
      if (impl->sizes() != pair.alias.sizes() || impl->strides() != pair.alias.strides())
        impl->set_sizes_and_strides(pair.alias.sizes(), pair.alias.strides());
    }
  }

 private:
  struct Pair {
    Tensor original, alias;
  };

  static Tensor over(c10::Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_storage_offset(like.storage_offset());
    impl->set_sizes_and_strides(like.sizes(), like.strides());
    if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
  }
  static bool holds_tensors(const c10::Type& type) {
    const auto* list = without_optional(type).castRaw<c10::ListType>();
    return list && without_optional(*list->getElementType()).kind() == c10::TypeKind::TensorType;
  }

  std::unordered_map<c10::TensorImpl*, Pair> aliases_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

// While it lives, the host's default generator gives the numbers of this device's: some kernels take no generator.
class Lent {
 public:
  explicit Lent(bool lent) : lent_(lent) {
    if (lent_) before_ = host().get_state(), host().set_state(mine().get_state());
  }
  ~Lent() {
    if (lent_) mine().set_state(host().get_state()), host().set_state(before_);
  }

 private:
  static at::Generator& host() {
    static at::Generator generator = at::detail::getDefaultCPUGenerator();
    return generator;
  }
  static at::Generator& mine() { return default_generator().get<Generator>()->host; }
  bool lent_;
  Tensor before_;
};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  Host host;
  for (size_t i = 0; i < arguments.size(); ++i) (*stack)[begin + i] = host.of((*stack)[begin + i], arguments[i]);
  {
    const Lent lent(op.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator(arguments));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  host.resize();
  for (size_t i = begin; i < stack->size(); ++i) (*stack)[i] = host.back((*stack)[i]);
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Host host;
  host.of(to).copy_(host.of(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor& set_from(Tensor& result, c10::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / result.dtype().itemsize());
  return at::native::set_storage_cpu_(result, std::move(storage), 0, {elements}, {});
}

Tensor& set_part(Tensor& result, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(result, std::move(storage), offset.guard_int(__FILE__, __LINE__),
                                      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                   at::IntArrayRef output_padding, int64_t groups) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Host host;
  return host.back(at::convolution(host.of(input), host.of(weight), host.of(bias.value_or(Tensor())), stride, padding,
                                   dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                        const Tensor& weight, at::IntArrayRef stride,
                                                        at::IntArrayRef padding, at::IntArrayRef dilation,
                                                        bool transposed, at::IntArrayRef output_padding,
                                                        int64_t groups, std::array<bool, 3> mask) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  Host host;
  auto [a, b, c] =
      at::convolution_backward(host.of(gradient), host.of(input), host.of(weight), at::IntArrayRef{gradient.size(1)},
                               stride, padding, dilation, transposed, output_padding, groups, mask);
  return {host.back(a), host.back(b), host.back(c)};
}

// The choice of scaled_dot_product_attention: 0 is its form made of other operators.
int64_t attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                  std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", &set_from);
  m.impl("set_.source_Storage_storage_offset", &set_part);
  m.impl("resize_", &resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

// ---------------------------------------------------------------------------------------------- autocast

// torch's own lists for accelerators (AT_FORALL_* of ATen/autocast_mode.h), which torch_npu registers too. That header
// takes twice as long to compile as the rest of this file, so the rules are written here as boxed kernels.
constexpr const char* kLow[] = {
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention"};
constexpr const char* kWide[] = {
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div",
    "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss",
    "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist",
    "pdist", "cdist", "renorm", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim", "upsample_nearest1d",
    "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
    "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa"};
constexpr const char* kWideOut[] = {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum",
                                    "linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum",
                                    "sum.dim_IntList"};
constexpr const char* kWidest[] = {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
                                   "index_put", "tensordot", "scatter_add", "stack", "cat"};

bool eligible(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kKind && tensor.is_floating_point() &&
         tensor.scalar_type() != at::kDouble;
}

// Calls `visit` for each tensor among `value`, in lists too, and stores what it returns.
template <class Visit>
void each(IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    auto list = value.toTensorList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, visit(list.get(i)));
    value = list;
  }
}

enum class Rule { low, wide, wide_out, widest };

template <Rule rule>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::autocast_dispatch_keyset);
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  bool any = false, wide = rule == Rule::wide;
  for (size_t i = begin; i < stack->size(); ++i)
    each((*stack)[i], [&](const Tensor& tensor) {
      any = any || eligible(tensor);
      wide = wide || (rule == Rule::widest && eligible(tensor) && tensor.scalar_type() == at::kFloat);
      return tensor;
    });
  const auto dtype = wide ? at::kFloat : at::autocast::get_autocast_dtype(kKind);
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (rule != Rule::wide_out)
      each(value, [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kKind); });
    else if (any && value.isNone() && arguments[i].name() == "dtype")
      value = static_cast<int64_t>(at::kFloat);
  }
  op.callBoxed(stack);
}

template <Rule rule, size_t count>
void rules(torch::Library& library, const char* const (&names)[count]) {
  for (const auto* name : names) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<rule>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  rules<Rule::low>(m, kLow);
  rules<Rule::wide>(m, kWide);
  rules<Rule::wide_out>(m, kWideOut);
  rules<Rule::widest>(m, kWidest);
}

// ---------------------------------------------------------------------------------------------- what torch asks

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int = 0) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto made = memory.allocate(size);
    memory.copy_data(made.mutable_get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(size);
  }
};
}  // namespace

struct _object;  // PyObject
_object* THPGenerator_initDefaultGenerator(const at::Generator&);  // of torch/csrc/Generator.h

// Returns the default generator as a new Python object; the caller has the GIL.
extern "C" _object* halfstep_host_generator() { return THPGenerator_initDefaultGenerator(default_generator()); }

// Operators that torch also has in a form made of others would take that form here, with other bits than the CPU's.
void take_cpu_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (name.getNamespace() == "aten" && op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) &&
        !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
  }
}

extern "C" void halfstep_host_device() {
  static Guard guard;
  static Hooks hooks;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kKind)].store(&guard);
  c10::SetAllocator(kKind, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention);
  take_cpu_kernels();
}
