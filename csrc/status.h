// Errors are values: no exception crosses an engine thread.
#pragma once

#include <cstring>
#include <string>
#include <utility>

namespace lazyckpt {

// OK, or an errno value with the operation that failed and the path it failed on.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(int error, std::string operation, std::string path)
      : error_(error), operation_(std::move(operation)), path_(std::move(path)) {}

  static Status Ok() { return {}; }

  bool ok() const { return error_ == 0; }
  int error() const { return error_; }
  const std::string& operation() const { return operation_; }
  const std::string& path() const { return path_; }
  std::string message() const { return operation_ + ": " + std::strerror(error_); }

 private:
  int error_ = 0;
  std::string operation_;
  std::string path_;
};

}  // namespace lazyckpt
