// Drives the engine from many threads, for the sanitizers: stress FOLDER SEED ROUNDS. test_sanitizers.py builds it.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "checksum.h"
#include "engine.h"
#include "reader.h"

using namespace lazyckpt;

namespace {

constexpr auto kNever = Clock::time_point::max();

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

struct Random {
  explicit Random(uint64_t seed) : engine(seed) {}
  size_t operator()(size_t from, size_t to) { return std::uniform_int_distribution<size_t>(from, to)(engine); }
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
  int (*free)(uint64_t, int, uint64_t) = Find<int(uint64_t, int, uint64_t)>("fake_free");
  const char* (*violations)() = Find<const char*()>("fake_violations");
};

const Fake& TheFake() {
  static const Fake fake(std::getenv("LAZYCKPT_CUDA_LIBRARY"));
  return fake;
}

const std::vector<StreamRef> kStreams{{0, 0}, {1, 0}};  // the default ones

struct Checkpoint {
  std::vector<uint64_t> on_devices;
  std::vector<std::vector<std::byte>> sources;
  std::vector<Row> rows;
  std::shared_ptr<Job> job;
  std::string path;
  uint64_t size = 0;
};

Checkpoint Begin(Engine& engine, Random& random, const std::string& path) {
  Checkpoint c;
  c.path = path;
  std::vector<Source> sources;
  const size_t count = random(1, 12);
  for (size_t i = 0; i < count; ++i) {
    auto& bytes = c.sources.emplace_back(random(1, 60000));
    for (size_t k = 0; k < bytes.size(); k += 97) bytes[k] = static_cast<std::byte>(random(0, 255));
    Source& source = sources.emplace_back();
    source.data = bytes.data();
    source.size = bytes.size();
    source.owners = random(0, 3);
    source.device = static_cast<int>(random(0, 2)) - 1;
    if (source.device >= 0) {
      c.on_devices.push_back(TheFake().allocate(source.device, bytes.size()));
      CHECK(TheFake().write(c.on_devices.back(), bytes.data(), bytes.size()) == 0);
      source.data = reinterpret_cast<const std::byte*>(c.on_devices.back());
    }
    c.rows.push_back({RowKind::kLiteral, 7, 0});
    c.rows.push_back({RowKind::kSource, static_cast<int64_t>(bytes.size()), static_cast<int64_t>(i)});
    c.rows.push_back({RowKind::kCrc32Le, 4, static_cast<int64_t>(i)});
    c.rows.push_back({RowKind::kCrc32Hex, 8, static_cast<int64_t>(i / 2)});
  }
  for (const Row& r : c.rows) c.size += static_cast<uint64_t>(r.size);
  Status status;
  c.job = engine.Begin(std::move(sources), 1, false, kStreams, &status);
  CHECK(status.ok());
  return c;
}

// When nothing reads them any more.
void Free(const Checkpoint& c) {
  for (const uint64_t pointer : c.on_devices) CHECK(TheFake().free(pointer, 0, 0) == 0);
}

void CheckFile(const Checkpoint& c, Random& random) {
  std::vector<std::byte> read(c.size);
  std::vector<ReadRange> ranges;
  std::vector<std::byte*> places;
  for (uint64_t at = 0; at < c.size;) {
    const uint64_t n = std::min<uint64_t>(random(1, 50000), c.size - at);
    ranges.push_back({at, n});
    places.push_back(read.data() + at);
    at += n;
  }
  ReadOptions options;
  options.threads = 3;
  options.backend = random(0, 1) != 0 ? "auto" : "posix";
  Status status;
  if (random(0, 3) == 0) Reader::Start(c.path, options, ranges, &status);  // given up at once
  const auto reader = Reader::Start(c.path, options, std::move(ranges), &status);
  CHECK(status.ok() && reader->ReadInto(places, std::vector<int>(places.size(), -1)).ok());
  size_t at = 0;
  size_t source = 0;
  for (const Row& r : c.rows) {
    if (r.kind == RowKind::kLiteral) CHECK(std::memcmp(read.data() + at, "literal", 7) == 0);
    if (r.kind == RowKind::kSource) {
      CHECK(std::memcmp(read.data() + at, c.sources[source].data(), c.sources[source].size()) == 0);
      const uint32_t crc = Crc32(0, c.sources[source].data(), c.sources[source].size());
      CHECK(std::memcmp(read.data() + at + c.sources[source].size(), &crc, 4) == 0);  // a little-endian machine
      ++source;
    }
    at += static_cast<size_t>(r.size);
  }
}

// One training loop: saves, waits at gates, fails and drops checkpoints.
void Train(Engine& engine, Random random, const std::string& prefix, size_t rounds, bool faulty) {
  for (size_t round = 0; round < rounds; ++round) {
    Checkpoint c = Begin(engine, random, prefix + std::to_string(round));
    const bool early = random(0, 1) != 0;
    const uint64_t reserved = random(0, 1) != 0 ? c.size : 0;
    const auto open = [&] { return engine.Open(*c.job, 0, c.path, reserved); };
    if (early) (void)open();
    (void)engine.Append(*c.job, 0, 0, c.rows, "literal");
    if (random(0, 20) == 0) {  // abandoned unsealed
      engine.Fail(*c.job, Status(ECANCELED, "abandoned", ""));
      CHECK(engine.WaitReleased(*c.job, kNever));
      Free(c);
      unlink(c.path.c_str());
      continue;
    }
    (void)engine.Seal(*c.job);
    std::thread committer([&] {
      if (!early) (void)open();
      CHECK(engine.WaitReleased(*c.job, kNever));
      CHECK(engine.WaitSettled(*c.job, kNever));
    });
    std::thread watcher([&] {
      for (int i = 0; i < 20; ++i)
        (void)engine.Locked([&] {
          double sum = c.job->copy_s + c.job->ring_wait_s + static_cast<double>(engine.ring().used());
          for (const auto& chunk : c.job->chunks)
            sum += static_cast<double>((chunk->copy_end - chunk->copy_begin).count() +
                                       (chunk->write_end - chunk->write_begin).count());
          return sum;
        });
    });
    CHECK(engine.WaitEager(*c.job, kNever));
    for (uint64_t owners : {1, 2})
      CHECK(random(0, 1) != 0 ? engine.WaitCaptured(*c.job, owners, kNever)
                              : engine.WaitEnqueued(*c.job, owners, kStreams, kNever));
    // Captured: training goes on and changes what these gates protected. Only what is written may be compared.
    const bool cancelled = random(0, 7) == 0;
    if (cancelled) engine.Fail(*c.job, Status(ECANCELED, "cancelled", ""));
    committer.join();
    watcher.join();
    const Status error = engine.Locked([&] { return c.job->error; });
    if (error.ok()) {
      CHECK(c.job->durable());
      CheckFile(c, random);
    } else {
      CHECK(faulty || cancelled);
    }
    Free(c);
    unlink(c.path.c_str());
  }
}

void Round(const std::string& folder, Random& random) {
  EngineOptions options;
  options.chunk_bytes = kBlockBytes * random(1, 4);
  options.max_ring_bytes = options.chunk_bytes * random(1, 6);
  options.io_depth = static_cast<unsigned>(random(1, 4));
  options.copy_threads = static_cast<unsigned>(random(0, 3));
  options.backend = random(0, 1) != 0 ? "auto" : "posix";
  options.direct = random(0, 1) != 0;
  options.register_buffers = random(0, 1) != 0;
  options.pin_ring = random(0, 1) != 0;
  options.copies_in_flight = random(1, 4);
  if (random(0, 1) != 0)
    for (int i = 0; i < 12; ++i) {
      static const char* kOperations[] = {"write", "sync", "create", "allocate", "truncate"};
      static const char* kEffects[] = {"EIO", "ENOSPC", "EINTR", "EAGAIN", "short", "short"};
      options.fault += (i > 0 ? "," : "") + std::string(kOperations[random(0, 4)]) + ":" +
                       std::to_string(random(1, 20)) + ":" + kEffects[random(0, 5)];
    }
  Status status;
  auto engine = Engine::Create(options, &status);
  CHECK(engine != nullptr);
  for (const StreamRef& s : kStreams) CHECK(engine->Attach(s.device, &status));
  engine->Reserve(options.max_ring_bytes);
  std::vector<std::thread> trainers;
  for (int i = 0; i < 3; ++i)
    trainers.emplace_back(Train, std::ref(*engine), Random(random(0, ~size_t{0})),
                          folder + "/" + std::to_string(i) + "-", 6, !options.fault.empty());
  for (auto& t : trainers) t.join();
  CHECK(engine->Locked([&] { return engine->ring().used(); }) == 0);
  // Closed in the middle of a checkpoint, copies and writes under way: neither hangs nor leaks.
  Checkpoint last = Begin(*engine, random, folder + "/last");
  (void)engine->Append(*last.job, 0, 0, last.rows, "literal");
  if (random(0, 1) != 0) (void)engine->Open(*last.job, 0, last.path, last.size);
  (void)engine->Seal(*last.job);
  if (random(0, 1) != 0) usleep(static_cast<unsigned>(random(0, 300)));
  engine.reset();
  Free(last);
  CHECK(std::strlen(TheFake().violations()) == 0);
  unlink(last.path.c_str());
}

size_t Descriptors() {
  const auto all = std::filesystem::directory_iterator("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 4);
  Random random(std::strtoull(arguments[2], nullptr, 10));
  CHECK(TheFake().allocate(0, 1) != 0);  // it keeps some open
  const size_t before = Descriptors();
  for (int rounds = std::atoi(arguments[3]); rounds > 0; --rounds) Round(arguments[1], random);
  CHECK(Descriptors() == before);
  return 0;
}
