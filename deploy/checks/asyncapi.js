// Parse an AsyncAPI document: node asyncapi.js FILE. Exit code 1 and a line for each diagnostic, hints apart.
const { Parser, fromFile } = require("@asyncapi/parser");

const HINT = 3;
const SEVERITIES = ["error", "warning", "info", "hint"];

(async () => {
  const file = process.argv[2];
  const { document, diagnostics } = await fromFile(new Parser(), file).parse();
  const problems = diagnostics.filter((it) => it.severity < HINT && it.code !== "asyncapi-latest-version");
  for (const it of problems) {
    console.error(`${file}:${it.range.start.line + 1}: ${SEVERITIES[it.severity]} ${it.code}: ${it.message} (${it.path.join(".")})`);
  }
  if (problems.length || !document) process.exit(1);
  const topics = document.channels().all().map((channel) => channel.address());
  console.log(`ok  ${file}: ${topics.length} topics, ${document.messages().all().length} messages (${topics.join(", ")})`);
})();
