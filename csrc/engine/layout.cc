// Cuts the program of a job into chunks and queues them in copy order.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "engine/engine.h"

namespace lazyckpt {
namespace {

uint64_t Crc32Size(RowKind kind, const Source& source) {
  if (kind == RowKind::kCrc32Segments) return 4 * source.CutsIn(0, source.size);
  return kind == RowKind::kCrc32Le ? 4 : 8;
}

// Cuts the run [offset, + size) where a segment of the source ends.
void AddCuts(Source& source, uint64_t offset, uint64_t size) {
  for (const uint64_t end = offset + size; source.segmented && offset < end;) {
    const uint64_t n = std::min(end, (offset / kSegmentBytes + 1) * kSegmentBytes) - offset;
    source.cuts.push_back({n, 0});
    offset += n;
  }
}

// Whether every byte of every file, or of the parts of it that this job writes, is in one chunk and every source is
// laid out.
bool IsComplete(const Job& job) {
  for (size_t i = 0; i < job.files.size(); ++i) {
    auto parts = job.files[i].parts;
    if (parts.empty()) parts.emplace_back(0, job.files[i].size);
    const auto chunks = job.ChunksInFileOrder(i);
    auto chunk = chunks.begin();
    for (const auto& [begin, end] : parts) {
      uint64_t at = begin;
      for (; at < end && chunk != chunks.end() && (*chunk)->offset == at; ++chunk) at += (*chunk)->size;
      if (at != end) return false;
    }
    if (chunk != chunks.end()) return false;
  }
  return std::all_of(job.sources.begin(), job.sources.end(),
                     [](const Source& s) { return s.size == 0 || !s.parts.empty(); });
}

}  // namespace

// Whether all eager host bytes of a job that is not laid out yet are sure to fit into the free part of the ring: in
// chunks, with everything in the files but lazy bytes. Eager bytes that share a chunk with the checksum of a lazy
// source are copied after it, so all lazy bytes before them count, too.
bool Engine::HasRoomForEager(const Job& job, std::span<const Extent> extents) const {
  size_t lost_chunks = ring_.capacity() / ring_.slice_bytes();  // at the end of each slice
  if (ring_.used() > 0) lost_chunks += 2;                       // where the ring wraps
  size_t bytes = lost_chunks * options_.chunk_bytes, lazy_bytes = 0, file = 0;
  bool after_lazy = false, after_lazy_sum = false;  // the last source; any checksum in the file
  for (const Extent& extent : extents) {
    bytes += kBlockBytes;
    after_lazy_sum = after_lazy_sum && extent.file == file;
    file = extent.file;
    for (const Row& row : extent.rows) {
      const auto size = static_cast<size_t>(row.size);
      const bool is_source = row.kind == static_cast<int64_t>(RowKind::kSource);
      const size_t source = extent.first_source + static_cast<size_t>(row.arg);
      const bool lazy = row.kind != static_cast<int64_t>(RowKind::kLiteral) && source < job.sources.size() &&
                        job.sources[source].owners != 0;
      if (!is_source) {
        after_lazy_sum = after_lazy_sum || lazy;
        bytes += size;
      } else if (lazy) {
        if (!after_lazy) bytes += 2 * kBlockBytes;  // the blocks that eager bytes share with lazy ones
        lazy_bytes += size;
      } else {
        bytes += size + (after_lazy_sum ? std::exchange(lazy_bytes, 0) : 0);
      }
      if (is_source) after_lazy = lazy;
    }
  }
  return bytes <= ring_.capacity() - ring_.used();
}

Status Engine::Append(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                      size_t first_source) {
  std::lock_guard lock(mutex_);
  if (!job.error.ok()) return job.error;
  Status status = LayOut(job, file, offset, rows, blob, first_source);
  if (!status.ok()) FailLocked(job, status);  // some of its chunks may be in the ring
  // Do not wake threads for a held job: they would compete with save() for cores.
  if (!job.held || !status.ok()) changed_.notify_all();
  return status;
}

Status Engine::LayOut(Job& job, size_t file, uint64_t offset, std::span<const Row> rows, std::string_view blob,
                      size_t first_source) {
  const Status invalid(EINVAL, "program of a checkpoint", "");
  if (file >= job.files.size() || job.sealed) return invalid;
  if (first_source > job.sources.size()) return invalid;
  const bool continues = job.open != nullptr && job.open->file == file && job.open->offset + job.open->size == offset;
  if (!continues) {
    QueueOpenChunk(job);
    if (offset % kBlockBytes != 0) return invalid;
  }
  // Checksums of segments stand in the extent of their source, so that only sources that need them are cut.
  for (const Row& row : rows) {
    if (row.kind != static_cast<int64_t>(RowKind::kCrc32Segments) || row.arg < 0) continue;
    const size_t arg = first_source + static_cast<size_t>(row.arg);
    if (arg < job.sources.size() && job.sources[arg].parts.empty()) job.sources[arg].segmented = true;
  }
  for (const Row& row : rows) {
    if (row.kind < 0 || row.kind > static_cast<int64_t>(RowKind::kCrc32Segments) || row.size < 0 || row.arg < 0)
      return invalid;
    const auto kind = static_cast<RowKind>(row.kind);
    const auto size = static_cast<uint64_t>(row.size);
    auto arg = static_cast<size_t>(row.arg);
    if (kind == RowKind::kLiteral) {
      if (arg > blob.size() || size > blob.size() - arg) return invalid;
    } else {
      if (arg >= job.sources.size() - first_source) return invalid;
      arg += first_source;
      Source& source = job.sources[arg];
      const bool laid_out = !source.parts.empty() || source.size == 0;
      if (kind == RowKind::kSource) {
        if (size != source.size || (laid_out && size > 0)) return invalid;
      } else if (!laid_out || size != Crc32Size(kind, source)) {
        return invalid;
      }
    }
    const bool eager = kind == RowKind::kSource && job.sources[arg].owners == 0;
    const bool lazy = kind == RowKind::kSource && job.sources[arg].owners != 0;
    const bool sum = kind != RowKind::kLiteral && kind != RowKind::kSource;
    for (uint64_t done = 0; done < size;) {
      if (job.open == nullptr) OpenChunk(job, file, offset);
      // Eager bytes share at most a block with lazy ones, and with checksums of lazy sources: save() waits for them.
      const bool after_lazy = !job.open->eager && (job.open->has_lazy || job.open->turn == Turn::kLazy);
      const bool lazy_sum = sum && job.sources[arg].turn == Turn::kLazy && job.open->turn != Turn::kLazy;
      if ((eager && after_lazy) || (lazy_sum && job.open->eager)) SplitAtLastBlock(job);
      Chunk* chunk = job.open;
      if (lazy && chunk->eager) chunk->limit = std::min(chunk->limit, AlignUp(chunk->size, kBlockBytes));
      const size_t n = std::min<uint64_t>(size - done, chunk->limit - chunk->size);
      if (n > 0) {
        Piece& piece = AddPiece(job, kind, static_cast<uint32_t>(n), kind == RowKind::kLiteral ? 0 : arg);
        if (kind == RowKind::kLiteral)
          piece.literal = reinterpret_cast<const std::byte*>(blob.data()) + arg + done;
        else
          piece.source_offset = done;
        if (kind == RowKind::kSource) {
          Source& source = job.sources[arg];
          piece.part = static_cast<uint32_t>(source.parts.size());
          source.parts.push_back({n, 0, source.cuts.size()});
          ++source.parts_left;
          AddCuts(source, done, n);
        }
        offset += n;
        done += n;
      }
      if (chunk->size == chunk->limit) QueueOpenChunk(job);
    }
  }
  job.files[file].size = std::max(job.files[file].size, offset);
  return Status::Ok();
}

void Engine::OpenChunk(Job& job, size_t file, uint64_t offset) {
  Chunk* chunk = job.chunks.emplace_back(std::make_unique<Chunk>()).get();
  chunk->job = &job;
  chunk->file = file;
  chunk->offset = offset;
  chunk->limit = options_.chunk_bytes;
  job.open = chunk;
}

// Appends to the open chunk a piece for which the caller fills in where its bytes come from. It is made in its place,
// since the processor stalls when it copies fields that were just written.
Piece& Engine::AddPiece(Job& job, RowKind kind, uint32_t size, size_t source_number) {
  Chunk* chunk = job.open;
  if (kind == RowKind::kSource) {
    const Source& source = job.sources[source_number];
    chunk->owners |= source.owners;
    (source.owners == 0 ? chunk->eager : chunk->has_lazy) = true;
    if (source.device >= 0) chunk->devices |= uint64_t{1} << source.device;
  } else if (kind != RowKind::kLiteral) {
    chunk->turn = std::max(chunk->turn, job.sources[source_number].turn);
  }
  Piece& piece = chunk->pieces.emplace_back();
  piece.kind = kind;
  piece.size = size;
  piece.at = static_cast<uint32_t>(chunk->size);
  piece.source = static_cast<uint32_t>(source_number);
  chunk->size += size;
  return piece;
}

// Queues the open chunk up to its last block boundary. The rest begins the next chunk, which eager bytes may share.
void Engine::SplitAtLastBlock(Job& job) {
  Chunk* chunk = job.open;
  const size_t end = chunk->size / kBlockBytes * kBlockBytes;
  if (end == 0) return;
  std::vector<Piece> rest;
  while (!chunk->pieces.empty() && chunk->pieces.back().at + chunk->pieces.back().size > end) {
    Piece& last = chunk->pieces.back();
    const auto keep = static_cast<uint32_t>(last.at < end ? end - last.at : 0);
    Piece moved = last;
    moved.size -= keep;
    if (moved.kind == RowKind::kLiteral)
      moved.literal += keep;
    else
      moved.source_offset += keep;
    if (moved.kind == RowKind::kSource &&
        keep > 0) {  // it is the source's last part so far, since a source is laid out in one go
      Source& source = job.sources[moved.source];
      source.parts[last.part].size = keep;
      source.cuts.resize(source.parts[last.part].first_cut);
      AddCuts(source, last.source_offset, keep);
      moved.part = static_cast<uint32_t>(source.parts.size());
      source.parts.push_back({moved.size, 0, source.cuts.size()});
      ++source.parts_left;
      AddCuts(source, moved.source_offset, moved.size);
    }
    rest.push_back(moved);
    last.size = keep;
    if (keep == 0) chunk->pieces.pop_back();
  }
  chunk->size = end;  // `owners` and `devices` may now name one too many, which then waits for one chunk more
  const size_t file = chunk->file;
  const uint64_t offset = chunk->offset + end;
  QueueOpenChunk(job);
  OpenChunk(job, file, offset);
  for (auto moved = rest.rbegin(); moved != rest.rend(); ++moved) {
    Piece& piece = AddPiece(job, moved->kind, moved->size, moved->source);
    moved->at = piece.at;
    piece = *moved;
  }
}

Status Engine::Seal(Job& job) {
  Status status;
  bool held = false;
  {
    std::lock_guard lock(mutex_);
    held = job.held;
    if (job.error.ok() && !job.sealed) {
      QueueOpenChunk(job);
      if (!IsComplete(job)) {
        status = Status(EINVAL, "program of a checkpoint: holes or overlaps", "");
        FailLocked(job, status);
      } else {
        job.sealed = true;
        QueueSyncs(job);
        CloseIfSettled(job);  // a job without files is durable at once
      }
    }
  }
  if (held && status.ok()) return status;  // Go() wakes the others
  changed_.notify_all();
  io_->Wake();
  return status;
}

void Engine::QueueOpenChunk(Job& job) {
  Chunk* chunk = job.open;
  if (chunk == nullptr) return;
  chunk->slots.reserve(
      std::count_if(chunk->pieces.begin(), chunk->pieces.end(), [](const Piece& p) { return p.is_checksum(); }));
  job.open = nullptr;
  size_t cuts = 0;
  for (const Piece& p : chunk->pieces)
    if (p.kind == RowKind::kSource) cuts += job.sources[p.source].CutsIn(p.source_offset, p.size);
  chunk->cut_crcs.resize(cuts);
  if (witness_ != nullptr) KeepEdges(chunk);
  chunk->state = Chunk::State::kQueued;
  ++job.files[chunk->file].chunks_left;
  ++job.capture_left;
  chunk->pieces_there = std::count_if(chunk->pieces.begin(), chunk->pieces.end(), [&job](const Piece& p) {
    return p.kind == RowKind::kSource && job.sources[p.source].device >= 0;
  });
  if (chunk->eager) {
    ++job.eager_left;
    job.eager_devices |= chunk->devices;
    if (chunk->devices != 0) ++job.eager_landing;
  }
  for (const int owner : Bits{chunk->owners}) {
    ++job.owner_waiting[owner];
    ++job.owner_left[owner];
  }
  const Turn own = !chunk->eager ? Turn::kLazy : chunk->devices != 0 ? Turn::kEagerDevice : Turn::kEagerHost;
  const Turn turn = chunk->turn = std::max(chunk->turn, own);
  for (const Piece& p : chunk->pieces)
    if (p.kind == RowKind::kSource) job.sources[p.source].turn = std::max(job.sources[p.source].turn, turn);
  if (turn == Turn::kLazy)
    queue_.push_back(chunk);
  else
    queue_.insert(chunk, [turn](const Chunk* c) { return c->turn > turn; });
}

}  // namespace lazyckpt
