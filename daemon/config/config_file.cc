#include "daemon/config/config_file.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/text_format.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/config/config.pb.h"
#include "daemon/config/option_value.h"

namespace gradsync::daemon {
namespace {

using google::protobuf::io::Tokenizer;

// A complete config has less than 10 KiB. A larger file is not a config.
constexpr std::size_t kMaxFileBytes = 1 << 20;

struct ParseError {
  int line;  // from 0
  std::string message;
};

class ErrorList : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int line, google::protobuf::io::ColumnNumber /*column*/,
                const std::string& message) override {
    errors_.push_back({line < 0 ? 0 : line, message});
  }
  const std::vector<ParseError>& errors() const { return errors_; }

 private:
  std::vector<ParseError> errors_;
};

// The text of one field: from its name to the next field's name.
struct Piece {
  std::string name;
  int line;  // from 0
  int last_line;
  bool bare = false;  // the value begins with a number or a word
  std::string text;
};

// Byte offset of a token. In Tokenizer's columns, a tab reaches the next multiple of 8.
std::size_t OffsetOf(const Tokenizer::Token& token, const std::vector<std::size_t>& line_starts,
                     const std::string& text) {
  std::size_t offset = line_starts[token.line];
  for (int column = 0; column < token.column && offset < text.size(); ++offset) {
    column = text[offset] == '\t' ? (column / 8 + 1) * 8 : column + 1;
  }
  return offset;
}

// Cuts the file into its fields. TextFormat stops at its first error, so each field is parsed by
// itself. A field begins with a name that precedes ':' or a bracket, or that begins a line.
std::vector<Piece> SplitFields(const std::string& text, ErrorList* errors) {
  std::vector<std::size_t> line_starts = {0};
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\n') line_starts.push_back(i + 1);
  }

  google::protobuf::io::ArrayInputStream input(text.data(), static_cast<int>(text.size()));
  Tokenizer tokenizer(&input, errors);
  tokenizer.set_comment_style(Tokenizer::SH_COMMENT_STYLE);
  tokenizer.set_require_space_after_number(false);
  tokenizer.set_allow_f_after_float(true);
  std::vector<Tokenizer::Token> tokens;
  for (tokenizer.Next(); tokenizer.current().type != Tokenizer::TYPE_END; tokenizer.Next()) {
    tokens.push_back(tokenizer.current());
  }

  std::vector<Piece> pieces;
  std::vector<std::size_t> starts;
  int depth = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const Tokenizer::Token& token = tokens[i];
    const std::string next = i + 1 < tokens.size() ? tokens[i + 1].text : "";
    const bool named = next == ":" || next == "{" || next == "<";
    const bool first_on_line =
        i > 0 && tokens[i - 1].line < token.line && tokens[i - 1].text != ":";
    const bool begins = i == 0 || (depth == 0 && token.type == Tokenizer::TYPE_IDENTIFIER &&
                                   (named || first_on_line));
    if (begins) {
      Piece piece;
      piece.name = token.text;
      piece.line = token.line;
      const Tokenizer::TokenType value =
          i + 2 < tokens.size() && next == ":" ? tokens[i + 2].type : Tokenizer::TYPE_SYMBOL;
      piece.bare = value != Tokenizer::TYPE_STRING && value != Tokenizer::TYPE_SYMBOL;
      pieces.push_back(piece);
      starts.push_back(OffsetOf(token, line_starts, text));
    }
    pieces.back().last_line = token.line;
    if (token.text == "{" || token.text == "<" || token.text == "[") ++depth;
    if (depth > 0 && (token.text == "}" || token.text == ">" || token.text == "]")) --depth;
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::size_t end = i + 1 < pieces.size() ? starts[i + 1] : text.size();
    pieces[i].text = text.substr(starts[i], end - starts[i]);
  }
  return pieces;
}

// The value of a field, as in a flag.
std::string ValueText(const config::Config& config,
                      const google::protobuf::FieldDescriptor* field) {
  const google::protobuf::Reflection* reflection = config.GetReflection();
  switch (field->cpp_type()) {
    case google::protobuf::FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(config, field) ? "true" : "false";
    case google::protobuf::FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection->GetUInt64(config, field));
    default:
      return reflection->GetString(config, field);
  }
}

std::string UnknownField(const std::string& name) {
  std::vector<std::string_view> names;
  for (const OptionEntry& option : OptionTable()) names.push_back(option.name);
  const std::string nearest = NearestName(name, names);
  return absl::StrCat("unknown field ", Quoted(name),
                      nearest.empty() ? "; gradsyncd --help lists the fields"
                                      : absl::StrCat("; did you mean ", nearest, "?"));
}

}  // namespace

Settings ParseConfig(const std::string& path, const std::string& text) {
  Settings result;
  const auto source = [&path](int line) { return absl::StrCat(path, ":", line + 1, ": "); };
  const auto fail = [&](int line, const std::string& what) {
    result.faults.push_back({line, absl::StrCat(source(line), what)});
  };

  ErrorList lexical_errors;
  const std::vector<Piece> pieces = SplitFields(text, &lexical_errors);
  std::set<int> illegible;
  for (const ParseError& error : lexical_errors.errors()) {
    fail(error.line, error.message);
    illegible.insert(error.line);
  }

  std::map<std::string, int> first_lines;
  for (const Piece& piece : pieces) {
    const auto told = illegible.lower_bound(piece.line);
    if (told != illegible.end() && *told <= piece.last_line) continue;
    const OptionEntry* option = FindOption(piece.name);
    const auto* field = config::Config::descriptor()->FindFieldByName(piece.name);
    if (option == nullptr || field == nullptr) {
      fail(piece.line, UnknownField(piece.name));
      continue;
    }
    const auto [first, inserted] = first_lines.emplace(piece.name, piece.line);
    if (!inserted) {
      fail(piece.line, absl::StrCat(piece.name, ": already given in line ", first->second + 1));
    }

    ErrorList errors;
    google::protobuf::TextFormat::Parser parser;
    parser.RecordErrorsTo(&errors);
    config::Config config;
    if (!parser.ParseFromString(piece.text, &config)) {
      const ParseError& error = errors.errors().front();
      const bool needs_quotes = piece.bare && option->literal == OptionEntry::Literal::kString;
      fail(piece.line + error.line,
           absl::StrCat(
               piece.name, ": ",
               needs_quotes ? "its value needs quotes" : absl::StripSuffix(error.message, "."),
               "; write ", piece.name, ": ", ToLiteral(*option, option->example)));
      continue;
    }
    result.settings.push_back({piece.line, option, ValueText(config, field),
                               absl::StrCat(source(piece.line), piece.name)});
  }
  return result;
}

Settings ReadConfigFile(const std::string& path) {
  Settings failed;
  const auto fail = [&](const std::string& why) {
    failed.faults.push_back({0, absl::StrCat("--config: ", Quoted(path), " ", why)});
    return failed;
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rbe"),
                                                             &std::fclose);
  if (file == nullptr) return fail(absl::StrCat("cannot be opened: ", std::strerror(errno)));
  std::string text(kMaxFileBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get())) return fail(absl::StrCat("cannot be read: ", std::strerror(errno)));
  if (text.size() > kMaxFileBytes) return fail("is larger than 1 MiB");
  return ParseConfig(path, text);
}

}  // namespace gradsync::daemon
