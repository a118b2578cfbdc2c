// Which pages of a checkpoint the kernel watches, and when.
//
// A save begins: ProtectAhead. Its sources are known: Watch. Each chunk is laid out: KeepEdges; copied: CopyWatched.
// Nothing is copied any more: EndWatch.
#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "checksum.h"
#include "engine.h"

namespace lazyckpt {

void Engine::ProtectAhead() {
  // Each range costs the other cores an interrupt, and the caller is busy there: small ones are left to Watch().
  constexpr size_t kLeastBytes = 256 << 10;
  if (witness_ == nullptr) return;
  {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const PageRange& pages : last_watched_) bytes += pages.bytes();
    if (ahead_ != nullptr || bytes < last_watched_.size() * kLeastBytes) return;  // another save begins, too; or small
    ahead_ = std::make_shared<Ahead>();
    ahead_->pages = last_watched_;
  }
  changed_.notify_all();
}

// Protects the next of them; false if there are none, or enough threads at it.
bool Engine::ProtectSome(bool helping, std::unique_lock<std::mutex>& lock) {
  constexpr size_t kBatchBytes = 16 << 20;  // 50 us: the caller of save() waits for a thread that has lost its core
  const std::shared_ptr<Ahead> ahead = ahead_;
  if (ahead == nullptr || ahead->next == ahead->pages.size() || (!helping && ahead->threads >= modest_)) return false;
  const size_t first = ahead->next;
  for (size_t bytes = 0; ahead->next < ahead->pages.size() && bytes < kBatchBytes; ++ahead->next)
    bytes += ahead->pages[ahead->next].bytes();
  const size_t end = ahead->next;
  ++ahead->threads;
  lock.unlock();
  for (size_t i = first; i < end; ++i) {
    PageRange& pages = ahead->pages[i];
    if (!witness_->ProtectAhead(pages)) pages.end = pages.begin;  // nothing to give up
  }
  lock.lock();
  --ahead->threads;
  if (ahead->threads == 0 && ahead->next == ahead->pages.size()) changed_.notify_all();
  return true;
}

// What was protected ahead: all of it, in the order of the addresses; no other caller gets it.
std::vector<PageRange> Engine::TakeAhead() {
  std::unique_lock lock(mutex_);
  while (ProtectSome(true, lock)) {
  }
  const std::shared_ptr<Ahead> ahead = std::exchange(ahead_, nullptr);
  if (ahead == nullptr) return {};
  changed_.wait(lock, [&ahead] { return ahead->threads == 0; });
  return std::move(ahead->pages);
}

void Engine::GiveUpAhead() {
  if (witness_ != nullptr) witness_->GiveUp(TakeAhead());
}

// From here on, what is written to lazy sources is noticed.
void Engine::Watch(Job& job) {
  const std::vector<PageRange> ahead = TakeAhead();
  const auto by_address = [](const PageRange& a, const PageRange& b) { return a.begin < b.begin; };
  for (Source& s : job.sources) {
    if (s.owners == 0 || s.device >= 0) continue;
    if (const PageRange pages = PageRange::Inside(s.data, s.size); !pages.empty())
      s.watched = static_cast<int64_t>(job.window.Add(pages));
    else
      s.owners = 0;
  }
  witness_->Open(&job.window);
  std::vector<PageRange> watched;
  std::vector<bool> used(ahead.size());
  for (Source& s : job.sources) {
    if (s.watched < 0) continue;
    const auto number = static_cast<size_t>(s.watched);
    const PageRange pages = job.window.pages(number);
    const auto at = std::lower_bound(ahead.begin(), ahead.end(), pages, by_address);
    if (at != ahead.end() && *at == pages) used[at - ahead.begin()] = true;
    if (witness_->Protect(&job.window, number)) {
      watched.push_back(pages);
    } else {
      s.watched = -1;
      s.owners = 0;
    }
  }
  std::sort(watched.begin(), watched.end(), by_address);
  std::vector<PageRange> unused;
  for (size_t i = 0; i < ahead.size(); ++i)
    if (!used[i]) unused.push_back(ahead[i]);
  witness_->GiveUp(unused);
  std::lock_guard lock(mutex_);
  last_watched_ = std::move(watched);
}

// Nothing of it is copied any more: training writes to these pages at full speed again.
void Engine::EndWatch(Job& job) {
  if (witness_ == nullptr) return;
  witness_->Close(&job.window);
  const std::vector<size_t> numbers = witness_->Written(&job.window);
  std::vector<size_t> torn;
  for (size_t i = 0; i < job.sources.size() && !numbers.empty(); ++i) {
    const int64_t watched = job.sources[i].watched;
    if (watched >= 0 && std::binary_search(numbers.begin(), numbers.end(), static_cast<size_t>(watched)))
      torn.push_back(i);
  }
  std::lock_guard lock(mutex_);
  job.torn = std::move(torn);
}

// A page that a watched piece shares with something else tells nothing of the piece: its bytes of that are copied now.
void Engine::KeepEdges(Chunk* chunk) {
  const auto edges_of = [chunk](const Piece& p) -> std::array<std::span<const std::byte>, 2> {
    if (p.kind != RowKind::kSource || chunk->job->sources[p.source].watched < 0) return {};
    return EdgesOf({chunk->job->sources[p.source].data + p.source_offset, p.size});
  };
  size_t bytes = 0;
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) bytes += edge.size();
  chunk->edges.reserve(bytes);
  for (const Piece& p : chunk->pieces)
    for (const auto& edge : edges_of(p)) chunk->edges.insert(chunk->edges.end(), edge.begin(), edge.end());
}

// One piece of a watched source, and what the witness says of it. `edges`: those of this piece and of what follows.
bool Engine::CopyWatched(Job& job, const Source& source, std::byte* to, const std::byte** edges, Piece* piece) {
  const std::span memory(source.data + piece->source_offset, piece->size);
  const auto [head, tail] = EdgesOf(memory);
  const size_t middle = memory.size() - head.size() - tail.size();
  uint32_t crc = CopyCrc32(0, to, *edges, head.size());
  crc = CopyCrc32(crc, to + head.size(), memory.data() + head.size(), middle);
  piece->crc = CopyCrc32(crc, to + head.size() + middle, *edges + head.size(), tail.size());
  *edges += head.size() + tail.size();
  bool patched = false;
  const bool clean = witness_->CheckAndOpen(&job.window, static_cast<size_t>(source.watched), memory.data(),
                                            memory.size(), to, &patched);
  if (patched) piece->crc = Crc32(0, to, memory.size());
  return clean;
}

}  // namespace lazyckpt
