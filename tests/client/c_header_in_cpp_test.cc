// gradsync.h in a C++ program: options from the environment.

#include <gradsync/gradsync.h>

#include <cstdlib>

#include "gtest/gtest.h"

namespace {

TEST(CHeaderTest, OptionsFromEnvironmentOwnTheirStrings) {
  setenv("RANK", "1", 1);
  setenv("WORLD_SIZE", "4", 1);
  setenv("MASTER_ADDR", "node0", 1);
  setenv("MASTER_PORT", "29500", 1);
  setenv("TORCHELASTIC_RUN_ID", "run", 1);
  setenv("GRADSYNC_SOCKET", "/tmp/some.sock", 1);
  gradsync_session_options_t options;
  gradsync_session_options_init(&options);
  options.step_timeout = 5;
  gradsync_error_t* error = gradsync_session_options_from_environment(&options);
  ASSERT_EQ(error, nullptr) << gradsync_error_message(error);
  setenv("GRADSYNC_SOCKET", "/tmp/other.sock", 1);
  EXPECT_STREQ(options.socket, "/tmp/some.sock");
  EXPECT_STREQ(options.job_id, "run@node0:29500");
  EXPECT_EQ(options.rank, 1u);
  EXPECT_EQ(options.world_size, 4u);
  EXPECT_EQ(options.step_timeout, 5);
  gradsync_session_options_destroy(&options);
  EXPECT_EQ(options.socket, nullptr);
}

TEST(CHeaderTest, OptionsThatAreSetNeedNoEnvironment) {
  for (const char* variable : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    unsetenv(variable);
  }
  setenv("GRADSYNC_SOCKET", "/tmp/some.sock", 1);
  gradsync_session_options_t options;
  gradsync_session_options_init(&options);
  options.job_id = "given";
  options.rank = 0;
  options.rank_given = 1;
  options.world_size = 2;
  gradsync_error_t* error = gradsync_session_options_from_environment(&options);
  ASSERT_EQ(error, nullptr) << gradsync_error_message(error);
  EXPECT_STREQ(options.job_id, "given");
  EXPECT_STREQ(options.socket, "/tmp/some.sock");
  EXPECT_EQ(options.rank, 0u);
  EXPECT_EQ(options.world_size, 2u);
  gradsync_session_options_destroy(&options);
}

TEST(CHeaderTest, EnvironmentErrorsNameTheVariable) {
  unsetenv("RANK");
  gradsync_session_options_t options;
  gradsync_session_options_init(&options);
  gradsync_error_t* error = gradsync_session_options_from_environment(&options);
  EXPECT_EQ(gradsync_error_code(error), GRADSYNC_INVALID_ARGUMENT);
  EXPECT_NE(std::string(gradsync_error_message(error)).find("RANK"), std::string::npos);
  gradsync_error_destroy(error);
}

}  // namespace
