// Has the kernel watch the pages of lazy host sources until they are copied.
//
// Watch runs when a job begins, KeepEdges when a chunk is laid out, CopyWatched when it is copied, EndWatch when
// nothing is copied any more. CollapseLoop makes huge pages between saves.
#include <algorithm>
#include <array>
#include <span>
#include <utility>
#include <vector>

#include "engine/checksum.h"
#include "engine/engine.h"
#include "engine/piece_sums.h"

namespace lazyckpt {

// How many files of a job may hold the same memory lazily: a Trainer saves the weights twice, for example.
constexpr uint32_t kMostWindows = 4;

// Detects writes to lazy sources from here on, with `eager_too` also to eager ones. A lazy source whose pages cannot be
// watched becomes eager. A window takes no pages twice: sources of the same memory go to the next one.
void Engine::Watch(Job& job, bool eager_too) {
  const auto begin = Clock::now();
  std::vector<Source*> left;
  for (Source& s : job.sources) {
    if ((s.owners == 0 && !eager_too) || s.device >= 0) continue;
    if (PageRange::Inside(s.data, s.size).empty())
      s.owners = 0;
    else
      left.push_back(&s);
  }
  for (uint32_t number = 0; number < kMostWindows && !left.empty(); ++number) {
    PageWindow& window = job.windows.emplace_back();
    for (Source* s : left) s->watched = static_cast<int64_t>(window.Add(PageRange::Inside(s->data, s->size)));
    witness_->Open(&window);
    witness_->Protect(&window);
    const size_t taken = std::erase_if(left, [&window, number](Source* s) {
      s->window = number;
      return window.is_protected(static_cast<size_t>(s->watched));
    });
    if (taken == 0) break;
  }
  for (Source* s : left) {
    s->watched = -1;
    s->owners = 0;
  }
  job.watch_s = std::chrono::duration<double>(Clock::now() - begin).count();
}

// Lifts the remaining protection, so that training writes at full speed, and names the torn sources.
void Engine::EndWatch(Job& job) {
  if (witness_ == nullptr) return;
  std::vector<size_t> torn;
  for (uint32_t number = 0; number < job.windows.size(); ++number) {
    PageWindow& window = job.windows[number];
    witness_->Close(&window);
    const std::vector<size_t> numbers = witness_->Written(&window);
    for (size_t i = 0; i < job.sources.size() && !numbers.empty(); ++i) {
      const Source& s = job.sources[i];
      if (s.watched >= 0 && s.window == number &&
          std::binary_search(numbers.begin(), numbers.end(), static_cast<size_t>(s.watched)))
        torn.push_back(i);
    }
    if (options_.huge_pages) witness_->WantHugePages(window);
  }
  std::sort(torn.begin(), torn.end());
  std::lock_guard lock(mutex_);
  job.torn = std::move(torn);
  may_collapse_ = true;
  watch_ended_.notify_one();
}

void Engine::CollapseLoop() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    watch_ended_.wait(lock, [this] { return stop_ || may_collapse_; });
    for (may_collapse_ = false; !stop_;) {
      lock.unlock();
      const bool more = witness_->CollapseNext();
      lock.lock();
      if (!more) break;
    }
  }
}

// Copies the bytes of watched pieces that lie in shared pages, since a write to such a page proves nothing.
void Engine::KeepEdges(Chunk* chunk) {
  const auto edges_of = [chunk](const Piece& p) -> std::array<std::span<const std::byte>, 2> {
    if (p.kind != RowKind::kSource || chunk->job->sources[p.source].watched < 0) return {};
    return EdgesOf({chunk->job->sources[p.source].data + p.source_offset, p.size});
  };
  size_t bytes = 0;
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) bytes += edge.size();
  if (bytes == 0) return;
  idle_edges_.reserve(++used_edges_ + idle_edges_.size());  // Release() allocates nothing
  if (!idle_edges_.empty()) {
    auto fits = std::lower_bound(idle_edges_.begin(), idle_edges_.end(), bytes,
                                 [](const auto& idle, size_t needed) { return idle.capacity() < needed; });
    if (fits == idle_edges_.end()) --fits;  // it grows
    chunk->edges = std::move(*fits);
    idle_edges_.erase(fits);
  }
  chunk->edges.reserve(bytes);
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) chunk->edges.insert(chunk->edges.end(), edge.begin(), edge.end());
}

// Copies the pieces of watched sources; false if one was written to. Works in batches: see PageWitness::CheckAndOpen.
bool Engine::CopyWatched(Job& job, Chunk* chunk) {
  std::array<PageWitness::Copied, 64> copied;
  PieceSums sums(chunk);
  size_t count = 0;
  uint32_t window = 0;  // of the batch
  bool clean = true;
  const auto check = [&] {
    const std::span batch(copied.data(), count);
    witness_->CheckAndOpen(&job.windows[window], batch);
    for (const auto& piece : batch) clean = clean && !piece.written;
    count = 0;
  };
  const std::byte* edges = chunk->edges.data();
  for (Piece& p : chunk->pieces) {
    if (p.kind != RowKind::kSource) continue;
    sums.Begin(p);
    const Source& source = job.sources[p.source];
    if (source.watched < 0) continue;
    if (count > 0 && source.window != window) check();
    window = source.window;
    const std::span memory(source.data + p.source_offset, p.size);
    const auto [head, tail] = EdgesOf(memory);
    const size_t middle = memory.size() - head.size() - tail.size();
    std::byte* const to = chunk->memory + p.at;
    sums.Copy(to, edges, head.size());
    sums.Copy(to + head.size(), memory.data() + head.size(), middle);
    sums.Copy(to + head.size() + middle, edges + head.size(), tail.size());
    p.crc = sums.crc();
    edges += head.size() + tail.size();
    copied[count++] = {static_cast<size_t>(source.watched), memory};
    if (count == copied.size()) check();
  }
  if (count > 0) check();
  return clean;
}

}  // namespace lazyckpt
