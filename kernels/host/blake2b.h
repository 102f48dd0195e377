// BLAKE2b (RFC 7693) without key, for short messages: the chained hashes of the KV cache's blocks.
// Equal to hashlib.blake2b(message, digest_size=n).
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace pelton::host {

class Blake2b {
 public:
  static constexpr std::size_t kBlock = 128;

  // digest_size: 1 to 64 bytes.
  explicit Blake2b(std::size_t digest_size) : digest_size_(digest_size), state_(kInitial) {
    state_[0] ^= 0x01010000u ^ digest_size;
  }

  void update(std::span<const std::byte> data) {
    while (!data.empty()) {
      // The last block is compressed by finish(), which marks it: keep a full one until more comes.
      if (filled_ == kBlock) {
        length_ += kBlock;
        compress(false);
        filled_ = 0;
      }
      const std::size_t n = std::min(data.size(), kBlock - filled_);
      std::memcpy(buffer_.data() + filled_, data.data(), n);
      filled_ += n;
      data = data.subspan(n);
    }
  }

  // Writes digest_size bytes to out.
  void finish(std::byte* out) {
    length_ += filled_;
    std::memset(buffer_.data() + filled_, 0, kBlock - filled_);
    compress(true);
    std::memcpy(out, state_.data(), digest_size_);
  }

 private:
  static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

  static constexpr std::array<uint64_t, 8> kInitial = {
      0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
      0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
  static constexpr uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                             {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                             {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                             {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                             {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                             {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                             {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                             {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                             {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                             {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

  void compress(bool last) {
    std::array<uint64_t, 16> m, v;
    std::memcpy(m.data(), buffer_.data(), kBlock);
    for (int i = 0; i < 8; ++i) {
      v[i] = state_[i];
      v[i + 8] = kInitial[i];
    }
    v[12] ^= length_;
    if (last) v[14] = ~v[14];
    const auto mix = [&](int a, int b, int c, int d, uint64_t x, uint64_t y) {
      v[a] += v[b] + x;
      v[d] = std::rotr(v[d] ^ v[a], 32);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 24);
      v[a] += v[b] + y;
      v[d] = std::rotr(v[d] ^ v[a], 16);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 63);
    };
    for (int round = 0; round < 12; ++round) {
      const uint8_t* s = kOrder[round % 10];
      for (int i = 0; i < 4; ++i) mix(i, i + 4, i + 8, i + 12, m[s[2 * i]], m[s[2 * i + 1]]);
      for (int i = 0; i < 4; ++i) {
        mix(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12, m[s[2 * i + 8]], m[s[2 * i + 9]]);
      }
    }
    for (int i = 0; i < 8; ++i) state_[i] ^= v[i] ^ v[i + 8];
  }

  std::size_t digest_size_;
  std::array<uint64_t, 8> state_;
  std::array<std::byte, kBlock> buffer_{};
  std::size_t filled_ = 0;
  uint64_t length_ = 0;  // messages of 2^64 bytes and more do not occur
};

}  // namespace pelton::host
