// A PyTorch device that computes on the CPU, later: the twin of a GPU for tests.
//
// A stream is a thread with a queue. An operation gets its shapes from PyTorch's meta kernels at once and its
// values from the CPU kernels when its turn comes, so the host runs ahead, as it does with a GPU. Memory comes
// from a caching allocator that gives a freed block away again at once, in the order of the block's stream, and
// has it overwritten there: what reads or writes memory that nothing orders finds other bytes.
//
// Random numbers are those of a seed that the host draws for each operation, so they do not depend on when an
// operation runs. There are two devices, each with a seed and current streams of its own; which is the current one is
// a thread's own. Copies from one to the other keep the streams of both in order. None of this works in a forked
// child: calls from there are counted.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/resource.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using c10::Stream;
using Lock = std::lock_guard<std::mutex>;
using Job = std::function<void()>;

constexpr auto kLagging = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kFreed = 0xAB, kFresh = 0xCD;

std::atomic<long> operation_delay{0}, copy_delay{0};  // microseconds
std::atomic<long> overwritten{0}, reused{0}, copies{0}, host_waits{0}, calls_in_child{0};
std::atomic<long> pinned_bytes{0}, memory_limit{0};
std::atomic<bool> obeys_limit{false};  // of locked memory (ulimit -l)
std::atomic<bool> failed{false};
const pid_t owner = getpid();

void called() {
  if (getpid() != owner) ++calls_in_child;
}

void check_health() {
  if (failed) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "an operation failed on the device");
}

// ---- streams and events ------------------------------------------------------------------------------------

class Queue {
 public:
  Queue() { std::thread([this] { serve(); }).detach(); }

  void put(Job job) {
    called();
    { Lock lock(mutex_); jobs_.push_back(std::move(job)); ++given_; }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const long target = given_;
    if (done_ < target) ++host_waits;
    changed_.wait(lock, [&] { return done_ >= target; });
  }

  bool idle() { Lock lock(mutex_); return done_ == given_; }

 private:
  void serve() {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::AutoGradMode no_graph(false);
    for (;;) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      try {
        if (!failed) job();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "lagging device: %.300s\n", error.what());
        failed = true;
      }
      job = nullptr;
      { Lock lock(mutex_); ++done_; }
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  long given_ = 0, done_ = 0;
};

std::mutex queues_mutex;
std::map<int64_t, Queue*>& queues() { static auto* all = new std::map<int64_t, Queue*>; return *all; }
int64_t last_stream = 0;
constexpr int64_t kStreams = 1000000;  // numbers of streams of each device
thread_local int64_t current_streams[kDevices] = {0, kStreams};
thread_local DeviceIndex current_device = 0;

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
int64_t& current_stream() { return current_streams[current_device]; }
Device here() { return Device(kLagging, current_device); }

// A device is the current one for as long as this lives.
class On {
 public:
  explicit On(Device device) { if (device.type() == kLagging) current_device = index_of(device); }
  ~On() { current_device = before_; }

 private:
  const DeviceIndex before_ = current_device;
};

Queue& queue_of(int64_t stream) {
  Lock lock(queues_mutex);
  auto*& queue = queues()[stream];
  if (!queue) queue = new Queue;  // never freed: its thread lives as long as the process
  return *queue;
}

Stream as_stream(int64_t id) { return Stream(Stream::UNSAFE, Device(kLagging, id / kStreams), id); }

// A point of a stream's work. It is reached also when the device has failed, so nothing waits for ever.
class Point {
 public:
  void reach() {
    { Lock lock(mutex_); reached_ = true; when_ = std::chrono::steady_clock::now(); }
    changed_.notify_all();
  }
  void wait() { std::unique_lock<std::mutex> lock(mutex_); changed_.wait(lock, [&] { return reached_; }); }
  bool reached() { Lock lock(mutex_); return reached_; }
  std::chrono::steady_clock::time_point when() { wait(); return when_; }

  static std::shared_ptr<Point> on(int64_t stream) {
    struct Reach {  // by its destructor: a queue drops the jobs of a device that failed
      std::shared_ptr<Point> point;
      ~Reach() { point->reach(); }
    };
    auto point = std::make_shared<Point>();
    auto reach = std::make_shared<Reach>(point);
    queue_of(stream).put([reach] {});
    return point;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point when_;
};

using Event = std::shared_ptr<Point>;

// ---- memory ------------------------------------------------------------------------------------------------

struct Block {
  void* address;
  size_t size;
  int64_t stream;
  std::set<int64_t> users;  // other streams, by record_stream
};

// Blocks are rounded to 512 bytes and fit requests of their own size only.
class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    called();
    if (!nbytes) return {nullptr, nullptr, &free_block, here()};
    Lock lock(mutex_);
    collect();
    const size_t size = (nbytes + 511) / 512 * 512;
    Block* block = take(size);
    if (!block && memory_limit && reserved() + size > size_t(memory_limit)) give_cache_back();
    if (!block) block = make(size);
    live_[block->address] = block;
    stats_.allocated_bytes[0].increase(size);
    return {block->address, block->address, &free_block, here()};
  }

  void free(void* address) {
    called();
    Lock lock(mutex_);
    auto found = live_.find(address);
    Block* block = found->second;
    live_.erase(found);
    stats_.allocated_bytes[0].decrease(block->size);
    if (block->users.empty()) return put_back(block);
    std::vector<Event> ends;
    for (auto stream : block->users) ends.push_back(Point::on(stream));
    block->users.clear();
    in_use_.emplace_back(block, std::move(ends));
  }

  void recordStream(const c10::DataPtr& memory, Stream stream) override {
    Lock lock(mutex_);
    auto found = live_.find(memory.get());
    if (found != live_.end() && found->second->stream != stream.id()) found->second->users.insert(stream.id());
  }

  static void free_block(void* address);
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    queue_of(current_stream()).wait();
    std::memcpy(to, from, nbytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Lock lock(mutex_); collect(); give_cache_back(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override { Lock lock(mutex_); return stats_; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {
    Lock lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
    stats_.reserved_bytes[0].reset_peak();
  }

 private:
  size_t reserved() { return stats_.reserved_bytes[0].current; }

  Block* take(size_t size) {
    auto& list = free_[{current_stream(), size}];
    if (list.empty()) return nullptr;
    Block* block = list.back();
    list.pop_back();
    ++reused;
    return block;
  }

  Block* make(size_t size) {
    TORCH_CHECK_WITH(OutOfMemoryError, !memory_limit || reserved() + size <= size_t(memory_limit),
                     "lagging device out of memory: ", size, " bytes beside ", reserved());
    void* address = std::aligned_alloc(512, size);
    std::memset(address, kFresh, size);
    stats_.reserved_bytes[0].increase(size);
    return new Block{address, size, current_stream(), {}};
  }

  // The block may be taken at once by its own stream, whose later work comes after the overwriting.
  void put_back(Block* block) {
    free_[{block->stream, block->size}].push_back(block);
    queue_of(block->stream).put([address = block->address, size = block->size] {
      std::memset(address, kFreed, size);
      ++overwritten;
    });
  }

  // Blocks whose other streams are done with them.
  void collect() {
    auto waiting = std::move(in_use_);
    in_use_.clear();
    for (auto& [block, ends] : waiting) {
      const bool over = std::all_of(ends.begin(), ends.end(), [](auto& end) { return end->reached(); });
      if (over) put_back(block); else in_use_.emplace_back(block, std::move(ends));
    }
  }

  void give_cache_back() {
    for (auto& [block, ends] : in_use_) for (auto& end : ends) end->wait();
    collect();
    for (auto& [key, list] : free_) {
      if (!list.empty()) queue_of(key.first).wait();
      for (Block* block : list) {
        stats_.reserved_bytes[0].decrease(block->size);
        std::free(block->address);
        delete block;
      }
      list.clear();
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block*> live_;
  std::map<std::pair<int64_t, size_t>, std::vector<Block*>> free_;
  std::vector<std::pair<Block*, std::vector<Event>>> in_use_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

Allocator& allocator() { static auto* one = new Allocator; return *one; }
void Allocator::free_block(void* address) { if (address) allocator().free(address); }

// Keeps what is freed until it is told to empty its cache, as PyTorch's does.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    called();
    Lock lock(mutex_);
    const size_t size = (nbytes + 4095) / 4096 * 4096 + 4096;  // an empty tensor begins inside, too
    rlimit most{};
    getrlimit(RLIMIT_MEMLOCK, &most);
    const auto refusal = "the limit of locked memory is " + std::to_string(most.rlim_cur) + " bytes";
    if (obeys_limit && size > most.rlim_cur) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 2, refusal);
    auto& list = free_[size];
    if (list.empty()) {
      list.push_back(static_cast<char*>(std::aligned_alloc(4096, size)));
      pinned_bytes += size;
    }
    char* address = list.back();
    list.pop_back();
    live_[address] = size;
    return {address, address, &unpin, Device(c10::kCPU)};
  }

  bool holds(const void* address) {
    Lock lock(mutex_);
    auto after = live_.upper_bound(static_cast<char*>(const_cast<void*>(address)));
    return after != live_.begin() && address < std::prev(after)->first + std::prev(after)->second;
  }

  void empty_cache() override {
    Lock lock(mutex_);
    for (auto& [size, list] : free_) {
      pinned_bytes -= size * list.size();
      for (char* address : list) std::free(address);
      list.clear();
    }
  }

  static PinnedAllocator& instance() { static auto* one = new PinnedAllocator; return *one; }
  static void unpin(void* address) {
    called();
    auto& self = instance();
    Lock lock(self.mutex_);
    auto found = self.live_.find(static_cast<char*>(address));
    self.free_[found->second].push_back(found->first);
    self.live_.erase(found);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
  bool record_event(void*, void*, Stream) override { return true; }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex mutex_;
  std::map<char*, size_t> live_;
  std::map<size_t, std::vector<char*>> free_;
};

bool is_pinned(const void* address) { return PinnedAllocator::instance().holds(address); }

// ---- what PyTorch asks of a device ---------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kLagging; }
  Device exchangeDevice(Device d) const override { auto old = here(); current_device = d.index(); return old; }
  Device getDevice() const override { return here(); }
  void setDevice(Device d) const override { current_device = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Stream getStream(Device d) const override { return as_stream(current_streams[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return as_stream(index_of(d) * kStreams); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device d, int) const override { Lock lock(queues_mutex); return as_stream(index_of(d) * kStreams + ++last_stream); }
  Stream exchangeStream(Stream stream) const override { return as_stream(std::exchange(current_streams[stream.device_index()], stream.id())); }
  bool queryStream(const Stream& stream) const override { return queue_of(stream.id()).idle(); }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream.id()).wait(); check_health(); }
  void synchronizeDevice(const DeviceIndex) const override {
    std::vector<Queue*> all;
    { Lock lock(queues_mutex); for (auto& [id, queue] : queues()) all.push_back(queue); }
    for (auto* queue : all) queue->wait();
    check_health();
  }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    point(*event) = Point::on(stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) queue_of(stream.id()).put([it = point(event)] { it->wait(); });
  }
  bool queryEvent(void* event) const override { return !event || point(event)->reached(); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    if (!point(event)->reached()) ++host_waits;
    point(event)->wait();
    check_health();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* began, void* ended, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(point(ended)->when() - point(began)->when()).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override { allocator().recordStream(memory, stream); }
  static Event& point(void* event) { return *static_cast<Event*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex i) const override { current_device = i; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(current_device, i); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return std::exchange(current_device, i); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::instance(); }
  Device getDeviceFromPtr(void*) const override { return here(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    On on(storage.device());
    auto memory = allocator().allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept) queue_of(current_stream()).put([to = memory.get(), from = storage.mutable_data(), kept] { std::memcpy(to, from, kept); });
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(nbytes);
  }
};

struct Registered {
  Registered() {
    c10::SetAllocator(kLagging, &allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::setHostAllocator(kLagging, &PinnedAllocator::instance());
  }
} registered;

// ---- operations ----------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kLagging; }

// A tensor as an operation that runs later sees it. Of the device's memory it holds nothing, as on a GPU.
class Later {
 public:
  explicit Later(const at::Tensor& tensor) : options_(at::TensorOptions().dtype(tensor.scalar_type())) {
    if (!is_ours(tensor) && !is_pinned(tensor.const_data_ptr())) {
      host_ = tensor.clone();  // an ordinary host tensor is read at once
      return;
    }
    address_ = tensor.numel() ? tensor.data_ptr() : nullptr;
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
  }
  at::Tensor now() const { return host_.defined() ? host_ : at::from_blob(address_, sizes_, strides_, options_); }

 private:
  void* address_ = nullptr;
  std::vector<int64_t> sizes_, strides_;
  at::TensorOptions options_;
  at::Tensor host_;
};

void launch(std::atomic<long>& delay, Job job) {
  queue_of(current_stream()).put([job = std::move(job), us = delay.load()] {
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
    job();
  });
  if (&delay == &copy_delay) ++copies;
}

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) list.push_back(each ? std::optional(change(*each)) : each);
    return list;
  }
  return value;
}

// Tensors of a value in their order, each to be had later.
IValue later(const IValue& value, std::vector<std::optional<Later>>& tensors) {
  return map_tensors(value, [&](const at::Tensor& tensor) {
    static const auto& placeholder = *new at::Tensor(at::empty({0}));
    tensors.push_back(tensor.defined() ? std::optional<Later>(tensor) : std::nullopt);
    return placeholder;
  });
}

int64_t seeds[kDevices] = {0, 77};

// The device of the first tensor that an operation is given, or the one that it is told.
Device device_of(const std::vector<IValue>& given) {
  for (const auto& value : given) {
    if (value.isDevice() && value.toDevice().type() == kLagging) return Device(kLagging, index_of(value.toDevice()));
    if (value.isTensor() && is_ours(value.toTensor())) return value.toTensor().device();
    if (!value.isTensorList()) continue;
    for (const at::Tensor& tensor : value.toTensorVector()) if (is_ours(tensor)) return tensor.device();
  }
  return here();
}

// Every operation that has no kernel below: shapes now, values later.
void run_later(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::AutoGradMode no_graph(false);
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  auto given = torch::jit::last(*stack, count).vec();
  const Device where = device_of(given);
  On on(where);
  torch::jit::Stack shapes, rest;
  std::vector<std::optional<Later>> inputs, outputs;
  std::unordered_map<c10::TensorImpl*, at::Tensor> metas;  // a tensor that is given twice is one
  auto as_meta = [&](const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    auto& meta = metas[tensor.unsafeGetTensorImpl()];
    if (!meta.defined()) meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta));
    return meta;
  };
  for (size_t i = 0; i < count; ++i) {
    const bool is_device = given[i].isDevice() && given[i].toDevice().type() == kLagging;
    const bool draws = schema.arguments()[i].name() == "generator";
    shapes.push_back(is_device ? IValue(Device(c10::kMeta)) : map_tensors(given[i], as_meta));
    rest.push_back(is_device ? IValue(Device(c10::kCPU)) : draws ? IValue(at::detail::createCPUGenerator(seeds[current_device]++)) : IValue());
  }
  op.callBoxed(&shapes);
  if (schema.name() == "aten::native_layer_norm") {  // its statistics: of CUDA's type by meta, of the input's by CPU
    for (int r : {1, 2}) shapes[r] = shapes[r].toTensor().to(given[0].toTensor().scalar_type());
  }
  torch::jit::Stack results;
  auto as_new = [&](const at::Tensor& meta) {
    if (!meta.defined()) return meta;
    return at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(where));
  };
  std::vector<bool> is_new;
  for (size_t r = 0; r < shapes.size(); ++r) {
    const auto* alias = schema.returns()[r].alias_info();
    is_new.push_back(!alias);
    if (!alias) { results.push_back(map_tensors(shapes[r], as_new)); continue; }
    TORCH_CHECK(alias->isWrite(), "the lagging device has no kernel of its own for a view: ", schema);
    size_t i = 0;  // the argument that is written and returned
    while (!schema.arguments()[i].alias_info() || schema.arguments()[i].alias_info()->beforeSets() != alias->beforeSets()) ++i;
    if (given[i].isTensor() && given[i].toTensor().sizes() != shapes[r].toTensor().sizes()) given[i].toTensor().resize_(shapes[r].toTensor().sizes());
    results.push_back(given[i]);
  }
  for (size_t i = 0; i < count; ++i) if (rest[i].isNone()) rest[i] = later(given[i], inputs);
  for (size_t r = 0; r < results.size(); ++r) if (is_new[r]) later(results[r], outputs);
  launch(operation_delay, [op, rest, inputs, outputs, is_new] {
    size_t next = 0;
    torch::jit::Stack values;
    for (const auto& value : rest) values.push_back(map_tensors(value, [&](const at::Tensor&) {
      const auto& input = inputs[next++];
      return input ? input->now() : at::Tensor();
    }));
    op.callBoxed(&values);
    next = 0;
    for (size_t r = 0; r < values.size(); ++r) if (is_new[r]) map_tensors(values[r], [&](const at::Tensor& made) {
      const auto& output = outputs[next++];
      if (output && made.defined()) output->now().copy_(made);
      return made;
    });
  });
  torch::jit::drop(*stack, count);
  for (auto& result : results) stack->push_back(std::move(result));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  On on(is_ours(from) ? from.device() : to.device());
  if (is_ours(from) && is_ours(to) && from.device() != to.device()) {  // as CUDA's: each stream waits for the other
    const int64_t source = current_streams[from.device().index()];
    const int64_t target = current_streams[to.device().index()];
    auto ready = Point::on(target);
    queue_of(source).put([ready] { ready->wait(); });
    launch(copy_delay, [from = Later(from), to = Later(to)] { to.now().copy_(from.now()); });
    auto done = Point::on(source);
    queue_of(target).put([done] { done->wait(); });
    return to;
  }
  const bool waits = !is_ours(to) && !(non_blocking && is_pinned(to.const_data_ptr()));
  if (!is_ours(from) && !non_blocking) {
    launch(copy_delay, [from = from.clone(), to = Later(to)] { to.now().copy_(from); });
    return to;
  }
  at::Tensor host = waits ? at::empty_like(to) : to;  // of what is not pinned, a copy is not read or written later
  if (waits) launch(copy_delay, [from = Later(from), host] { host.copy_(from.now()); });
  else launch(copy_delay, [from = Later(from), to = Later(to)] { to.now().copy_(from.now()); });
  if (waits) {
    queue_of(current_stream()).wait();
    check_health();
    at::Tensor(to).copy_(host);
  }
  return to;
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> d, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(d.value_or(here()));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> d, std::optional<bool>) {
  On on(d.value_or(here()));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}
at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Scalar item(const at::Tensor& self) {
  On on(self.device());
  const Later value(self);
  queue_of(current_stream()).wait();
  check_health();
  return value.now().item();
}
bool equal(const at::Tensor& one, const at::Tensor& other) { return at::equal(one.cpu(), other.cpu()); }
void record_stream(at::Tensor& self, Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  library.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  library.impl("resize_", TORCH_FN(at::native::resize_));
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &item);
  library.impl("equal", &equal);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
  // Else it would be made of operations whose statistics are not of the type that its backward takes.
  library.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

}  // namespace

// ---- what tests ask, by ctypes ---------------------------------------------------------------------------------

extern "C" {
void lag_by(long operation, long copy) { operation_delay = operation; copy_delay = copy; }
void lag_sleep(long us) { queue_of(current_stream()).put([us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); }); }
void lag_fail() { queue_of(current_stream()).put([] { throw std::runtime_error("told to fail"); }); }
void lag_heal() { failed = false; }
void lag_obey(long limit) { obeys_limit = limit; }
void lag_limit(long nbytes) { memory_limit = nbytes; }
void lag_set_seed(long value) { seeds[current_device] = value; }
long lag_seed() { return seeds[current_device]; }
long lag_count(int which) {
  std::atomic<long>* const counts[] = {&overwritten, &reused, &copies, &host_waits, &calls_in_child, &pinned_bytes};
  return *counts[which];
}
}
