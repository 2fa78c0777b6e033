// One training step as a picture of text: what every rank computed, and when each bucket was ready,
// reduced and done.

#ifndef CLIENT_EXAMPLES_TIMELINE_H_
#define CLIENT_EXAMPLES_TIMELINE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "client/examples/report.h"
#include "client/examples/step_trace.h"
#include "client/examples/text_style.h"

namespace gradsync::examples {

// `ranks[r]` is rank r's trace of the same step; all have as many buckets as `buckets`. The ranks
// are spread evenly over `nodes` nodes, in order. Ends with a legend.
std::string DrawTimeline(const std::vector<StepTrace>& ranks,
                         const std::vector<BucketReport>& buckets, std::size_t nodes,
                         const TextStyle& style);

}  // namespace gradsync::examples

#endif  // CLIENT_EXAMPLES_TIMELINE_H_
