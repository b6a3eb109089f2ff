// A CPU allocator that counts. It hands every request to PyTorch's own allocator
// (so the profiler still sees it) and remembers the size of what is alive. While
// recording, it also keeps one event per allocation and per free, from any thread, with
// the thread's identity as Python's threading.get_ident() gives it.
//
// Interface for ctypes: plain C functions, int64 arrays.
#include <c10/core/CPUAllocator.h>

#include <pthread.h>

#include <chrono>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

struct Event {
  int64_t time_ns, address, bytes, thread;
};

int64_t this_thread() { return (int64_t)pthread_self(); }

struct Ledger {
  std::mutex mutex;
  std::unordered_map<void*, int64_t> alive;
  std::vector<Event> events;
  bool recording = false;
  int64_t last_ns = 0;
  int64_t since_mark = 0, peak_since_mark = 0;
  c10::Allocator* inner = nullptr;

  // Strictly increasing, so that an event never ties with a phase mark.
  int64_t now_ns() {
    auto since = std::chrono::steady_clock::now().time_since_epoch();
    int64_t now = std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    return last_ns = std::max(now, last_ns + 1);
  }
  void note(void* address, int64_t bytes) {
    events.push_back({now_ns(), reinterpret_cast<int64_t>(address), bytes, this_thread()});
  }
  void born(void* address, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex);
    alive[address] = bytes;
    since_mark += bytes;
    peak_since_mark = std::max(peak_since_mark, since_mark);
    if (recording) note(address, bytes);
  }
  void died(void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = alive.find(address);
    if (found == alive.end()) return;
    if (recording) note(address, -found->second);
    since_mark -= found->second;
    alive.erase(found);
  }
};

// Never destroyed: tensors may outlive every static object at interpreter exit.
Ledger& ledger() {
  static Ledger* one = new Ledger();
  return *one;
}

void free_counted(void* address) {
  ledger().died(address);
  ledger().inner->raw_deleter()(address);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = ledger().inner->raw_allocate(bytes);
    if (address != nullptr) ledger().born(address, static_cast<int64_t>(bytes));
    return {address, address, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

extern "C" {

// Returns 0, or 1 if the allocator in force cannot be wrapped.
int meter_install() {
  Ledger& book = ledger();
  if (book.inner != nullptr) return 0;
  c10::Allocator* inner = c10::GetCPUAllocator();
  if (inner->raw_deleter() == nullptr) return 1;
  book.inner = inner;
  c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/100);
  return 0;
}

int64_t meter_now_ns() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().now_ns();
}

void meter_record(int on) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().recording = on != 0;
  if (on) ledger().events.clear();
}

// From here on bytes are summed up anew, beside the events.
void meter_mark() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  ledger().since_mark = ledger().peak_since_mark = 0;
}

// The most bytes that were alive at once since the mark, beyond those at the mark.
int64_t meter_peak_since_mark() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return ledger().peak_since_mark;
}

int64_t meter_event_count() {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  return static_cast<int64_t>(ledger().events.size());
}

// Copies up to `count` events as rows (time_ns, address, bytes, thread) into `out`.
void meter_read(int64_t* out, int64_t count) {
  std::lock_guard<std::mutex> lock(ledger().mutex);
  for (int64_t row = 0; row < count && row < (int64_t)ledger().events.size(); ++row) {
    const Event& event = ledger().events[row];
    out[4 * row] = event.time_ns;
    out[4 * row + 1] = event.address;
    out[4 * row + 2] = event.bytes;
    out[4 * row + 3] = event.thread;
  }
}

}  // extern "C"
