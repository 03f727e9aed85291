// Prompts to begin with. The embedded demonstration model was trained for their kind.

const WEATHER = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the current weather in a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
      },
    },
  },
];

const PERSON = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

const PLAIN = { tools: "", tool_choice: "auto", format: "text", logprobs: false, thinking: "" };
const text = (value) => JSON.stringify(value, null, 2);

/** What each is called, says and sets; one that `isDrawn` brings an image. */
export const EXAMPLES = [
  { name: "Think in steps", prompt: "What is 347 + 586?", settings: PLAIN },
  {
    name: "See the probabilities",
    prompt: "What is 68 * 47?",
    settings: { ...PLAIN, logprobs: true, thinking: "off" },
  },
  {
    name: "Call a tool",
    prompt: "What is the weather in Oslo?",
    settings: { ...PLAIN, tools: text(WEATHER) },
  },
  {
    name: "Answer in JSON",
    prompt: "Extract the name, age and city as JSON: Maria is 34 years old and lives in Lisbon.",
    settings: { ...PLAIN, format: "json_schema", schema: text(PERSON) },
  },
  { name: "Look at a drawing", prompt: "How many circles are there?", settings: PLAIN, isDrawn: true },
];
