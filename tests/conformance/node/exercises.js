// The live server, and what the clients ask of it: exercises that the embedded model knows.

import { z } from "zod";

export const URL = process.env.CONFORMANCE_URL;
export const BASE_URL = `${URL}/v1`;
export const KEY = process.env.CONFORMANCE_KEY;
export const MODEL = process.env.CONFORMANCE_MODEL;

export const SUM = "What is 17 + 25?";
export const WEATHER = "What is the weather in Paris?";
export const WEATHER_RESULT = { temperature: 21, sky: "sunny" };
export const EXTRACT = "Give me JSON with name and age: Anna is 31 years old.";

export const Person = z.object({ name: z.string(), age: z.number().int() });
export const ANNA = { name: "Anna", age: 31 };

export const WEATHER_FUNCTION = {
  name: "get_weather",
  description: "Get the current weather in a city",
  parameters: {
    type: "object",
    properties: { city: { type: "string", description: "The city." } },
    required: ["city"],
    additionalProperties: false,
  },
};

export const user = (content) => ({ role: "user", content });

/** Whether an answer says what WEATHER_RESULT says. */
export const tellsTheResult = (text) => text.includes("21") && text.includes("sunny");
