// PyTorch's allocator of CPU memory, with the figures that allocators of accelerators keep: the bytes that are live,
// and the most of them since that was last reset. Both are exact, whatever else the process or the machine does.

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex mutex;
std::unordered_map<void*, long> sizes;
long live = 0, peak = 0;

c10::Allocator* inner() {
  static c10::Allocator* const found = c10::GetDefaultCPUAllocator();
  return found;
}

void release(void* data) {
  if (!data) return;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto known = sizes.find(data);
    live -= known->second;
    sizes.erase(known);
  }
  inner()->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* data = inner()->raw_allocate(nbytes);
    if (data) {
      std::lock_guard<std::mutex> lock(mutex);
      sizes[data] = static_cast<long>(nbytes);
      live += static_cast<long>(nbytes);
      peak = std::max(peak, live);
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

}  // namespace

extern "C" {
void count(int on) {
  static Counting counting;
  c10::SetCPUAllocator(on ? &counting : inner(), 1);
}
long live_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  return live;
}
long peak_bytes() {
  std::lock_guard<std::mutex> lock(mutex);
  return peak;
}
void reset_peak() {
  std::lock_guard<std::mutex> lock(mutex);
  peak = live;
}
}
