// Drives the engine from many threads, for the sanitizers: stress FOLDER SEED ROUNDS. See __init__.py.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>

#include "engine/checksum.h"
#include "engine/engine.h"
#include "engine/range_reader.h"
#include "witness/page_witness.h"

using namespace lazyckpt;

namespace {

std::atomic<size_t> torn_checkpoints = 0;
constexpr auto kNever = Clock::time_point::max();
constexpr int kAll = -1;
thread_local int threads_granted = kAll;  // how many more threads this thread may start

// Memory runs out on the engine's threads: those that a thread starts while `starts_engine` holds.
std::atomic<int> allocations_granted = kAll;
std::atomic<bool> memory_ran_out = false;
thread_local bool starts_engine = false;
thread_local bool is_engine = false;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

}  // namespace

struct Start {
  void* (*run)(void*);
  void* argument;
  bool is_engine;
};

void* Run(void* start) {
  const Start s = *static_cast<Start*>(start);
  std::free(start);
  is_engine = s.is_engine;
  return s.run(s.argument);
}

// A machine that refuses threads. Stands before the functions of the C library and of the sanitizer.
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*run)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_granted == 0) return EAGAIN;
  if (threads_granted > 0) --threads_granted;
  auto* start = static_cast<Start*>(std::malloc(sizeof(Start)));
  *start = {run, argument, starts_engine};
  const int error = create(thread, attributes, Run, start);
  if (error != 0) std::free(start);
  return error;
}

bool MayAllocate() {
  int granted = allocations_granted;
  while (is_engine && granted != kAll)
    if (granted == 0 || allocations_granted.compare_exchange_weak(granted, granted - 1)) {
      if (granted == 0) memory_ran_out = true;
      return granted > 0;
    }
  return true;
}

void* operator new(size_t size) {
  if (!MayAllocate()) throw std::bad_alloc();
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

struct Random {
  explicit Random(uint64_t seed) : engine(seed) {}
  size_t operator()(size_t from, size_t to) { return std::uniform_int_distribution<size_t>(from, to)(engine); }
  bool OneIn(size_t n) { return (*this)(1, n) == 1; }
  Random Fork() { return Random((*this)(0, ~size_t{0})); }  // for another thread
  void Pause(size_t most_us) { usleep(static_cast<unsigned>((*this)(0, most_us))); }
  std::mt19937_64 engine;
};

// The devices that tests/fake_cuda plays.
struct Fake {
  explicit Fake(const char* path) : library(dlopen(path, RTLD_NOW)) { CHECK(library != nullptr); }
  template <class F>
  F* Find(const char* name) const {
    return reinterpret_cast<F*>(dlsym(library, name));
  }
  void* library;
  uint64_t (*allocate)(int, uint64_t) = Find<uint64_t(int, uint64_t)>("fake_malloc");
  int (*write)(uint64_t, const void*, uint64_t) = Find<int(uint64_t, const void*, uint64_t)>("fake_write");
  int (*read)(uint64_t, void*, uint64_t) = Find<int(uint64_t, void*, uint64_t)>("fake_read");
  int (*free)(uint64_t, int, uint64_t) = Find<int(uint64_t, int, uint64_t)>("fake_free");
  int (*kernel)(int, uint64_t, const char*, double, const uint64_t*, uint64_t,
                int) = Find<int(int, uint64_t, const char*, double, const uint64_t*, uint64_t, int)>("fake_kernel");
  void (*fail)(const char*, uint64_t, int, int) = Find<void(const char*, uint64_t, int, int)>("fake_fail");
  const char* (*violations)() = Find<const char*()>("fake_violations");
};

const Fake& TheFake() {
  static const Fake fake(std::getenv("LAZYCKPT_CUDA_LIBRARY"));
  return fake;
}

const std::vector<StreamRef> kStreams{{0, 0}, {1, 0}};  // the default ones

uint64_t OnDevice(int device, const void* bytes, size_t size) {
  const uint64_t pointer = TheFake().allocate(device, size);
  CHECK(pointer != 0 && TheFake().write(pointer, bytes, size) == 0);
  return pointer;
}

// In the order of the device's default stream.
void FreeOnDevice(uint64_t pointer) { CHECK(TheFake().free(pointer, 1, 0) == 0); }

// Waits, sometimes with deadlines that pass.
template <class Wait>
void Await(Random& random, Wait wait) {
  while (!wait(random.OneIn(2) ? kNever : Clock::now() + std::chrono::microseconds(random(0, 3000)))) {
  }
}

struct Part {  // of the training state
  std::vector<std::byte> bytes;
  uint64_t owners;
  int device;
  uint64_t pointer = 0;  // on the device
};

struct Extent {
  size_t file;
  uint64_t offset;
  std::vector<Row> rows;
  std::string blob;
};

struct Checkpoint {
  std::vector<Part> parts;
  std::vector<Extent> extents;
  std::vector<std::string> paths;  // of its files
  std::vector<std::string> bytes;  // and what they are to hold
  std::shared_ptr<Job> job;
};

void AddRow(Checkpoint& c, Extent& extent, RowKind kind, int64_t arg, const std::string& bytes) {
  extent.rows.push_back({static_cast<int64_t>(kind), static_cast<int64_t>(bytes.size()), arg});
  c.bytes[extent.file] += bytes;
}

void AddLiteral(Checkpoint& c, Extent& extent, const std::string& bytes) {
  extent.blob += bytes;
  AddRow(c, extent, RowKind::kLiteral, static_cast<int64_t>(extent.blob.size() - bytes.size()), bytes);
}

Checkpoint Begin(Engine& engine, Random& random, const std::string& path, bool eager_by_caller) {
  Checkpoint c;
  for (size_t i = random(1, 3); i > 0; --i) c.paths.push_back(path + "-" + std::to_string(i));
  c.bytes.resize(c.paths.size());
  std::vector<Source> sources;
  std::vector<uint32_t> crcs;
  const size_t count = random(1, 12);
  for (size_t i = 0; i < count; ++i) {
    Part& part = c.parts.emplace_back(
        Part{std::vector<std::byte>(random(1, 60000)), random(0, 3), static_cast<int>(random(0, 2)) - 1});
    for (size_t k = 0; k < part.bytes.size(); k += 97) part.bytes[k] = static_cast<std::byte>(random(0, 255));
    if (part.device >= 0) part.pointer = OnDevice(part.device, part.bytes.data(), part.bytes.size());
    const auto* data = part.device < 0 ? part.bytes.data() : reinterpret_cast<const std::byte*>(part.pointer);
    sources.push_back({.data = data, .size = part.bytes.size(), .owners = part.owners, .device = part.device});
    crcs.push_back(Crc32(0, part.bytes.data(), part.bytes.size()));

    const size_t file = random(0, c.paths.size() - 1);
    if (!c.extents.empty() && c.extents.back().file != file) {  // where an extent begins, a block does
      const uint64_t end = c.bytes[c.extents.back().file].size();
      AddLiteral(c, c.extents.back(), std::string(AlignUp(end, kBlockBytes) - end, '\0'));
    }
    Extent& extent = c.extents.emplace_back(Extent{file, c.bytes[file].size(), {}, ""});
    char hex[9];
    std::snprintf(hex, sizeof hex, "%08x", crcs[i / 2]);
    AddLiteral(c, extent, "literal");
    const auto number = static_cast<int64_t>(i);
    AddRow(c, extent, RowKind::kSource, number, {reinterpret_cast<const char*>(part.bytes.data()), part.bytes.size()});
    AddRow(c, extent, RowKind::kCrc32Le, number, {reinterpret_cast<const char*>(&crcs[i]), 4});  // little-endian
    AddRow(c, extent, RowKind::kCrc32Hex, number / 2, hex);
  }
  Status status;
  c.job = engine.Begin(std::move(sources), c.paths.size(), eager_by_caller, kStreams, {}, &status);
  CHECK(status.ok());
  return c;
}

// Training goes on: it writes to the eager sources (no owners), or to those that these owners protect.
void Change(Checkpoint& c, uint64_t owners, Random& random) {
  for (Part& part : c.parts) {
    if (owners == 0 ? part.owners != 0 : (part.owners & owners) == 0) continue;
    const uint64_t byte = random(0, 255);
    const uint64_t write[] = {part.pointer, part.bytes.size(), byte};
    if (part.device < 0)
      std::memset(part.bytes.data(), static_cast<int>(byte), part.bytes.size());
    else
      CHECK(TheFake().kernel(part.device, 0, "step", 0, write, 1, 0) == 0);
  }
}

// Writes to lazy host memory while it waits to be copied, as no training should. The kernel does it, by a bare system
// call: the sanitizers see no writer, and the page witness has to.
void Intrude(const Checkpoint& c, Random random) {
  static const int zero = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  for (const Part& part : c.parts) {
    if (part.owners == 0 || part.device >= 0 || part.bytes.size() < 3 * kPageBytes || random.OneIn(2)) continue;
    random.Pause(500);
    const size_t at = random(0, part.bytes.size() - 1);
    CHECK(syscall(SYS_read, zero, part.bytes.data() + at, random(1, part.bytes.size() - at)) > 0);
  }
}

// Only after nothing reads or writes them any more.
void Remove(const Checkpoint& c) {
  for (const Part& part : c.parts)
    if (part.device >= 0) FreeOnDevice(part.pointer);
  for (const std::string& path : c.paths) unlink(path.c_str());
}

// Reads a file in random ranges to the host, to devices or to nowhere.
void CheckFile(Engine& engine, const std::string& path, const std::string& bytes, Random& random, bool faulty) {
  std::string host(bytes.size(), '\0');
  std::vector<ReadRange> ranges;
  std::vector<std::byte*> places;
  std::vector<int> devices;
  for (uint64_t at = 0; at < bytes.size(); at += ranges.back().size) {
    const uint64_t n = std::min<uint64_t>(random(1, 50000), bytes.size() - at);
    ranges.push_back({at, n});
    devices.push_back(static_cast<int>(random(0, 2)) - 1);
    places.push_back(reinterpret_cast<std::byte*>(host.data() + at));
    if (devices.back() >= 0)
      places.back() = reinterpret_cast<std::byte*>(OnDevice(devices.back(), host.data() + at, n));
    else if (random.OneIn(5))
      places.back() = nullptr;
  }
  ReadOptions options;
  options.threads = static_cast<unsigned>(random(1, 4));
  options.io_depth = static_cast<unsigned>(random(1, 8));
  options.backend = random.OneIn(2) ? "auto" : "posix";
  options.staging = engine.Borrow(random(0, 4) * kReadBytes);
  options.upload = [&](int device, std::span<const DeviceCopy> copies) { return engine.Upload(device, copies); };
  if (faulty && random.OneIn(2)) options.fault = random.OneIn(2) ? "read:1:short" : "read:1:EINTR,read:3:EIO";
  threads_granted = random.OneIn(4) ? static_cast<int>(random(0, 2)) : kAll;
  Status status;
  if (random.OneIn(4)) {  // given up
    const auto reader = RangeReader::Start(path, options, ranges, &status);
    random.Pause(500);
  }
  auto reader = RangeReader::Start(path, options, ranges, &status);
  threads_granted = kAll;
  if (status.ok()) status = engine.CopyAfter(kStreams);
  if (status.ok()) status = reader->ReadInto(places, devices);
  CHECK(status.ok() || faulty);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const uint64_t at = ranges[i].offset, size = ranges[i].size;
    if (status.ok()) CHECK(reader->ranges()[i].crc == Crc32(0, bytes.data() + at, size));
    if (devices[i] < 0 && places[i] == nullptr) std::memcpy(host.data() + at, bytes.data() + at, size);
    if (devices[i] < 0) continue;
    const auto pointer = reinterpret_cast<uint64_t>(places[i]);
    CHECK(TheFake().read(pointer, host.data() + at, size) == 0);
    FreeOnDevice(pointer);
  }
  CHECK(!status.ok() || host == bytes);
  reader.reset();
  engine.GiveBack(options.staging);
}

// One training loop: saves, waits at gates, fails and drops checkpoints.
void Train(Engine& engine, Random random, const std::string& prefix, size_t rounds, bool faulty, bool watched) {
  for (const StreamRef& s : kStreams) {  // all loops at once
    Status status;
    for (threads_granted = static_cast<int>(random(0, 2)); !engine.Attach(s.device, &status); threads_granted = kAll)
      CHECK(status.error() == EAGAIN);
    threads_granted = kAll;
  }
  for (size_t round = 0; round < rounds; ++round) {
    const bool held = random.OneIn(2);
    const bool cancelled = random.OneIn(8);
    const bool abandoned = random.OneIn(20);
    const bool intruded = watched && random.OneIn(3);
    Checkpoint c = Begin(engine, random, prefix + std::to_string(round), held);
    std::vector<std::thread> others;
    for (size_t file = 0; file < c.paths.size(); ++file)
      others.emplace_back([&, file, random = random.Fork()]() mutable {
        random.Pause(3000);
        (void)engine.Open(*c.job, file, c.paths[file], random.OneIn(2) ? c.bytes[file].size() : 0);
      });
    if (cancelled)
      others.emplace_back([&, random = random.Fork()]() mutable {
        random.Pause(5000);
        engine.Fail(*c.job, Status(ECANCELED, "cancelled", ""));
      });
    others.emplace_back([&, random = random.Fork()]() mutable {
      Await(random, [&](auto end) { return engine.WaitReleased(*c.job, end); });
      Await(random, [&](auto end) { return engine.WaitSettled(*c.job, end); });
    });
    others.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        (void)engine.Locked([&] {
          double sum = c.job->copy_s + c.job->ring_wait_s + static_cast<double>(engine.ring().used());
          for (const auto& chunk : c.job->chunks)
            sum += static_cast<double>((chunk->copy_end - chunk->copy_begin).count() +
                                       (chunk->write_end - chunk->write_begin).count());
          for (const Source& s : c.job->sources) sum += s.crc;
          return sum + (engine.bounces() ? 1 : 0) + (engine.unpinned().ok() ? 1 : 0);
        });
    });
    for (const Extent& e : c.extents) {
      if (random.OneIn(4)) random.Pause(200);
      (void)engine.Append(*c.job, e.file, e.offset, e.rows, e.blob);
    }
    if (abandoned)
      engine.Fail(*c.job, Status(ECANCELED, "abandoned", ""));
    else
      (void)engine.Seal(*c.job);
    Await(random, [&](auto end) { return engine.WaitEager(*c.job, end); });
    const auto lazy = engine.Locked([&] {  // sources that cannot be watched are eager
      std::vector<uint64_t> owners;
      for (const Source& s : c.job->sources) owners.push_back(s.owners);
      return owners;
    });
    for (size_t i = 0; i < lazy.size(); ++i) c.parts[i].owners = lazy[i];
    if (intruded) others.emplace_back([&, random = random.Fork()]() mutable { Intrude(c, random.Fork()); });
    if (held) engine.Go(*c.job);
    Change(c, 0, random);
    for (uint64_t owners : {1, 2}) {
      const bool enqueued = random.OneIn(2);
      Await(random, [&](auto end) {
        return enqueued ? engine.WaitEnqueued(*c.job, owners, kStreams, end) : engine.WaitCaptured(*c.job, owners, end);
      });
      Change(c, owners, random);
    }
    for (auto& t : others) t.join();
    const Status error = engine.Locked([&] { return c.job->error; });
    const bool torn = engine.Locked([&] { return !c.job->torn.empty(); });
    CHECK(error.ok() ? c.job->durable() && !abandoned : faulty || cancelled || abandoned || torn);
    CHECK(!torn || intruded);
    if (torn) ++torn_checkpoints;
    for (size_t file = 0; error.ok() && file < c.paths.size(); ++file)
      CheckFile(engine, c.paths[file], c.bytes[file], random, faulty);
    Remove(c);
  }
}

std::string Faults(Random& random, const std::string& folder) {
  static const char* kOperations[] = {"write", "sync", "create", "allocate", "truncate"};
  static const char* kEffects[] = {"EIO", "ENOSPC", "EINTR", "EAGAIN", "short", "short"};
  std::string faults = "trace:" + folder + "/trace";
  for (int i = 0; i < 12; ++i)
    faults += "," + std::string(kOperations[random(0, 4)]) + ":" + std::to_string(random(1, 20)) + ":" +
              kEffects[random(0, 5)];
  return faults;
}

// Lets the engine's threads allocate `granted` times, in each part of a save and a load in turn. The part fails with
// ENOMEM, or does without the memory; nothing hangs, and the next save is whole.
void CheckLackOfMemory(const std::string& folder, const std::string& backend, bool watched) {
  constexpr size_t kBytes = 100 * kBlockBytes + 5;
  const std::vector<std::byte> eager(kBytes, std::byte{1});
  std::vector<std::byte> lazy(kBytes, std::byte{2});
  const std::string path = folder + "/memory";
  const auto soon = [] { return Clock::now() + std::chrono::seconds(60); };
  size_t failed_saves = 0, failed_reads = 0;
  for (int granted = 0;; ++granted) {
    EngineOptions options{.max_ring_bytes = 300 * kBlockBytes,
                          .chunk_bytes = kBlockBytes,
                          .io_depth = 4,
                          .copy_threads = 2,
                          .backend = backend,
                          .watch_pages = watched};
    Status status;
    starts_engine = true;
    const auto engine = Engine::Create(options, &status);
    starts_engine = false;
    CHECK(status.ok());
    engine->Reserve(options.max_ring_bytes);
    memory_ran_out = false;
    for (const bool scarce : {true, false}) {
      std::vector<Source> sources(2);
      sources[0] = {.data = eager.data(), .size = kBytes, .owners = 0};
      sources[1] = {.data = lazy.data(), .size = kBytes, .owners = 1};
      const auto job = engine->Begin(sources, 1, false, {}, {}, &status);
      CHECK(status.ok());
      if (scarce) allocations_granted = granted;
      const std::vector<Row> rows{{1, kBytes, 0}, {2, 4, 0}, {1, kBytes, 1}, {3, 8, 1}};
      (void)engine->Append(*job, 0, 0, rows, "");
      (void)engine->Seal(*job);
      (void)engine->Open(*job, 0, path, 0);
      CHECK(engine->WaitSettled(*job, soon()));
      allocations_granted = kAll;
      const Status error = engine->Locked([&] { return job->error; });
      CHECK(error.ok() || (scarce && error.error() == ENOMEM));
      if (!error.ok()) ++failed_saves;
      if (scarce) unlink(path.c_str());
    }
    std::vector<ReadRange> ranges{{0, kBytes}, {kBytes + 4, kBytes}};
    std::vector<std::byte> read(2 * kBytes);
    allocations_granted = granted;
    starts_engine = true;
    const auto reader = RangeReader::Start(path, {.threads = 2, .backend = backend}, ranges, &status);
    starts_engine = false;
    CHECK(status.ok());
    status = reader->ReadInto({read.data(), read.data() + kBytes}, {-1, -1});
    allocations_granted = kAll;
    CHECK(status.ok() || status.error() == ENOMEM);
    if (status.ok()) CHECK(read.front() == eager.front() && read.back() == lazy.back());
    if (!status.ok()) ++failed_reads;
    unlink(path.c_str());
    if (!memory_ran_out) break;
  }
  CHECK(failed_saves > 0 && failed_reads > 0);
}

size_t Descriptors() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

// ThreadSanitizer opens files itself to match its suppressions.
#ifdef __SANITIZE_THREAD__
constexpr bool kMayLackDescriptors = false;
#else
constexpr bool kMayLackDescriptors = true;
#endif

// Limits the process to some more descriptors while it lives.
class Scarce {
 public:
  explicit Scarce(size_t more) {
    CHECK(getrlimit(RLIMIT_NOFILE, &before_) == 0);
    const rlimit scarce{Descriptors() + more, before_.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &scarce) == 0);
  }
  ~Scarce() { CHECK(setrlimit(RLIMIT_NOFILE, &before_) == 0); }

 private:
  rlimit before_;
};

void Round(const std::string& folder, Random& random, bool can_watch) {
  EngineOptions options;
  options.watch_pages = can_watch && random.OneIn(2);
  options.chunk_bytes = kBlockBytes * random(1, options.watch_pages ? 16 : 4);
  options.max_ring_bytes = random.OneIn(3) ? 2 * kReadBytes : options.chunk_bytes * random(1, 6);
  options.io_depth = static_cast<unsigned>(random(1, 4));
  options.copy_threads = static_cast<unsigned>(random(0, 3));
  options.backend = random.OneIn(2) ? "auto" : "posix";
  options.direct = random.OneIn(2);
  options.pin_ring = random.OneIn(2);
  options.copies_in_flight = random(1, 4);
  options.copies_ahead = random(1, 8);
  bool faulty = random.OneIn(2);
  if (faulty) options.fault = Faults(random, folder);
  constexpr const char* kCopy = "cuMemcpyDtoHAsync_v2";
  constexpr const char* kWait = "cuEventSynchronize";
  constexpr int kUnknown = 999;  // CUDA_ERROR_UNKNOWN
  for (const char* name : {kCopy, kWait}) TheFake().fail(name, faulty ? random(1, 200) : ~uint64_t{0}, kUnknown, 0);
  std::optional<Scarce> scarce;
  if (kMayLackDescriptors && random.OneIn(4)) {
    faulty = true;
    scarce.emplace(random(0, 20));
  }
  Status status;
  threads_granted = random.OneIn(4) ? static_cast<int>(random(0, 8)) : kAll;
  auto engine = Engine::Create(options, &status);
  CHECK(engine != nullptr || faulty || threads_granted == 0);
  threads_granted = kAll;
  if (engine == nullptr) {
    unlink((folder + "/trace").c_str());
    return;
  }
  engine->Reserve(random(1, options.max_ring_bytes));
  std::vector<std::thread> trainers;
  for (int i = 0; i < 3; ++i)
    trainers.emplace_back(Train, std::ref(*engine), random.Fork(), folder + "/" + std::to_string(i) + "-", 6, faulty,
                          options.watch_pages);
  engine->Reserve(options.max_ring_bytes);
  for (auto& t : trainers) t.join();
  CHECK(engine->Locked([&] { return engine->ring().used(); }) == 0);
  // Close the engine during copies and writes: it neither hangs nor leaks.
  std::vector<Checkpoint> last;
  for (size_t i = random(1, 3); i > 0; --i) {
    Checkpoint& c = last.emplace_back(Begin(*engine, random, folder + "/last-" + std::to_string(i), random.OneIn(3)));
    for (const Extent& e : c.extents) (void)engine->Append(*c.job, e.file, e.offset, e.rows, e.blob);
    if (random.OneIn(2)) (void)engine->Open(*c.job, 0, c.paths[0], c.bytes[0].size());
    if (random.OneIn(2)) (void)engine->Seal(*c.job);
  }
  random.Pause(300);
  for (const Checkpoint& c : last) {
    if (!options.watch_pages) break;
    engine->Fail(*c.job, Status(ECANCELED, "dropped", ""));
    CHECK(engine->WaitReleased(*c.job, kNever));  // as a dropped handle does: the window ends with the job
  }
  engine.reset();
  for (const Checkpoint& c : last) Remove(c);
  const std::string violations = TheFake().violations();
  if (!violations.empty()) std::fprintf(stderr, "%s\n", violations.c_str());
  CHECK(violations.empty());
  unlink((folder + "/trace").c_str());
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 4);
  Random random(std::strtoull(arguments[2], nullptr, 10));
  CHECK(TheFake().allocate(0, 1) != 0);  // opens descriptors that it keeps
  Status why;
  const bool can_watch = PageWitness::OfProcess(&why) != nullptr;
  Checkpoint none;
  Intrude(none, random.Fork());  // opens the file that it reads
  const size_t before = Descriptors();
  for (const char* backend : {"auto", "posix"})
    for (const bool watched : {false, true})
      if (can_watch || !watched) CheckLackOfMemory(arguments[1], backend, watched);
  const int rounds = std::atoi(arguments[3]);
  // More rounds, if by chance no intruder has met a page that waited for its copy.
  const auto is_enough = [&](int round) { return round >= rounds && (torn_checkpoints > 0 || !can_watch); };
  for (int round = 0; !is_enough(round) && round < 10 * rounds; ++round) Round(arguments[1], random, can_watch);
  CHECK(Descriptors() == before);
  CHECK(torn_checkpoints > 0 || !can_watch);
  std::printf("%zu torn checkpoints\n", torn_checkpoints.load());
  return 0;
}
