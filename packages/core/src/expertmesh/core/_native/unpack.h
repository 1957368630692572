// The way back from what `pack` in launcher.py makes of machine code: base64 of a raw DEFLATE stream (RFC 4648, RFC 1951).
// An image travels in a program as text, once for each launch.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace expertmesh {

inline std::string FromBase64(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size() * 3 / 4);
  uint32_t bits = 0;
  int count = 0;
  for (char c : text) {
    int value;
    if (c >= 'A' && c <= 'Z') value = c - 'A';
    else if (c >= 'a' && c <= 'z') value = c - 'a' + 26;
    else if (c >= '0' && c <= '9') value = c - '0' + 52;
    else if (c == '+') value = 62;
    else if (c == '/') value = 63;
    else if (c == '=') break;
    else throw std::runtime_error("the image is not base64");
    bits = bits << 6 | static_cast<uint32_t>(value);
    if ((count += 6) >= 8) bytes.push_back(static_cast<char>(bits >> (count -= 8)));
  }
  return bytes;
}

// A canonical Huffman code: how many codes have each length, and the symbols in the order of their codes.
class Huffman {
 public:
  static constexpr int kMaxLength = 15;

  Huffman(const uint8_t* lengths, int size) {
    for (int i = 0; i < size; ++i) ++count_[lengths[i]];
    std::array<int, kMaxLength + 2> next{};
    for (int length = 1; length <= kMaxLength; ++length) next[length + 1] = next[length] + count_[length];
    for (int i = 0; i < size; ++i) {
      if (lengths[i]) symbols_[next[lengths[i]]++] = static_cast<uint16_t>(i);
    }
  }

  template <typename Bit>
  int Read(Bit bit) const {
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= kMaxLength; ++length) {
      code |= bit();
      if (code - first < count_[length]) return symbols_[index + code - first];
      index += count_[length];
      first = (first + count_[length]) * 2;
      code *= 2;
    }
    throw std::runtime_error("the image has an unknown code");
  }

 private:
  std::array<int, kMaxLength + 1> count_{};
  std::array<uint16_t, 320> symbols_{};
};

class Inflater {
 public:
  explicit Inflater(std::string_view in) : in_(in) {}

  std::string Run() {
    bool last = false;
    while (!last) {
      last = Bits(1);
      switch (Bits(2)) {
        case 0: Stored(); break;
        case 1: Fixed(); break;
        case 2: Dynamic(); break;
        default: throw std::runtime_error("the image has an unknown block");
      }
    }
    return std::move(out_);
  }

 private:
  int Bits(int count) {
    int value = 0;
    for (int i = 0; i < count; ++i) {
      if (at_ / 8 >= in_.size()) throw std::runtime_error("the image is cut off");
      value |= (in_[at_ / 8] >> at_ % 8 & 1) << i;
      ++at_;
    }
    return value;
  }

  void Stored() {
    at_ = (at_ + 7) / 8 * 8;
    const int size = Bits(16);
    Bits(16);  // its complement
    if (at_ / 8 + size > in_.size()) throw std::runtime_error("the image is cut off");
    out_.append(in_.substr(at_ / 8, size));
    at_ += 8 * static_cast<size_t>(size);
  }

  void Fixed() {
    uint8_t lengths[288 + 30];
    for (int i = 0; i < 288; ++i) lengths[i] = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
    for (int i = 288; i < 288 + 30; ++i) lengths[i] = 5;
    Codes(Huffman(lengths, 288), Huffman(lengths + 288, 30));
  }

  void Dynamic() {
    static constexpr uint8_t kOrder[] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    const int literals = Bits(5) + 257, distances = Bits(5) + 1, coded = Bits(4) + 4;
    uint8_t lengths[286 + 32 + 138] = {};
    for (int i = 0; i < coded; ++i) lengths[kOrder[i]] = static_cast<uint8_t>(Bits(3));
    const Huffman of_lengths(lengths, 19);
    for (int i = 0; i < literals + distances;) {
      const int symbol = of_lengths.Read([this] { return Bits(1); });
      if (symbol < 16) {
        lengths[i++] = static_cast<uint8_t>(symbol);
        continue;
      }
      if (symbol == 16 && i == 0) throw std::runtime_error("the image repeats nothing");
      const uint8_t value = symbol == 16 ? lengths[i - 1] : 0;
      const int times = symbol == 16 ? 3 + Bits(2) : symbol == 17 ? 3 + Bits(3) : 11 + Bits(7);
      for (int j = 0; j < times; ++j) lengths[i++] = value;
    }
    Codes(Huffman(lengths, literals), Huffman(lengths + literals, distances));
  }

  void Codes(const Huffman& of_literals, const Huffman& of_distances) {
    const auto bit = [this] { return Bits(1); };
    while (true) {
      const int symbol = of_literals.Read(bit);
      if (symbol == 256) return;
      if (symbol < 256) {
        out_.push_back(static_cast<char>(symbol));
        continue;
      }
      const size_t length = Length(symbol - 257), distance = Distance(of_distances.Read(bit));
      if (distance > out_.size()) throw std::runtime_error("the image refers to what is not there");
      for (size_t i = 0; i < length; ++i) out_.push_back(out_[out_.size() - distance]);
    }
  }

  // Four lengths, and two distances, for each number of extra bits.
  size_t Length(int code) {
    if (code == 28) return 258;
    if (code < 8) return 3 + code;
    const int extra = code / 4 - 1;
    return 3 + ((4 + code % 4) << extra) + Bits(extra);
  }

  size_t Distance(int code) {
    if (code < 4) return 1 + code;
    const int extra = code / 2 - 1;
    return 1 + (static_cast<size_t>(2 + code % 2) << extra) + Bits(extra);
  }

  std::string_view in_;
  size_t at_ = 0;  // in bits
  std::string out_;
};

inline std::string Unpack(std::string_view text) { return Inflater(FromBase64(text)).Run(); }

}  // namespace expertmesh
