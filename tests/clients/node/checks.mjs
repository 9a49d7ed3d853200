// Runs the checks of a client, and prints the outcome of each as one line of JSON for run.py.
import { readFileSync } from 'node:fs'

export const ADDRESS = process.env.EDGELM_ADDRESS
export const MODEL = process.env.EDGELM_MODEL
export const PATIENCE_MS = 600_000 // for one answer: the machine may be busy, and no check is about speed

export function assert(true_, message) {
  if (!true_) throw new Error(`not true: ${message}`)
}

export async function main(packageName, checks) {
  const { version } = JSON.parse(readFileSync(`node_modules/${packageName}/package.json`, 'utf8'))
  console.log(JSON.stringify({ version }))
  const wanted = process.argv.slice(2)
  for (const [name, check] of Object.entries(checks)) {
    if (wanted.length && !wanted.includes(name)) continue
    let outcome = 'passed'
    let reason = ''
    try {
      await check()
    } catch (error) {
      outcome = 'failed'
      reason = String(error?.message ?? error).slice(0, 500)
      console.error(name, error)
    }
    console.log(JSON.stringify({ check: name, outcome, reason }))
  }
}
