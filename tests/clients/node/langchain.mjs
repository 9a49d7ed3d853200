// LangChain for JavaScript: forced tools are called once, and structured output by each of its ways.
import { tool } from '@langchain/core/tools'
import { ChatOpenAI } from '@langchain/openai'
import { z } from 'zod'
import { ADDRESS, MODEL, PATIENCE_MS, assert, main } from './checks.mjs'

const prompt = 'What is the weather in Paris?'
const model = new ChatOpenAI({
  model: MODEL, apiKey: 'any', maxTokens: 300, maxRetries: 0, timeout: PATIENCE_MS,
  configuration: { baseURL: `${ADDRESS}/v1` },
})
const weather = tool(async () => 'sunny', {
  name: 'weather', description: 'Tells the weather', schema: z.object({ city: z.string() }),
})
const Weather = z.object({ city: z.string(), sky: z.enum(['clear', 'cloudy']) })

await main('@langchain/openai', {
  async a_forced_tool_is_called_once() {
    for (const choice of ['required', 'any', 'weather']) {
      const { tool_calls: calls } = await model.bindTools([weather], { tool_choice: choice }).invoke(prompt)
      assert(calls.length === 1, `${choice}: ${JSON.stringify(calls)}`)
      assert(Object.keys(calls[0].args).join() === 'city', JSON.stringify(calls))
    }
  },
  async structured_output() {
    for (const method of ['functionCalling', 'jsonSchema']) {
      const made = await model.withStructuredOutput(Weather, { method, name: 'weather' }).invoke(prompt)
      assert(Weather.safeParse(made).success, `${method}: ${JSON.stringify(made)}`)
    }
  },
})
