// What a page shows in headless Chromium: node measure.mjs FILE WIDTH prints it as JSON.
import chromium from "@sparticuz/chromium";
import puppeteer from "puppeteer-core";
import { pathToFileURL } from "node:url";

const [file, width] = process.argv.slice(2);
const browser = await puppeteer.launch({
  args: [...chromium.args, "--no-sandbox"],
  executablePath: await chromium.executablePath(),
  headless: "shell",
});
const page = await browser.newPage();
const errors = [];
page.on("pageerror", (error) => errors.push(error.message));
page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
page.on("request", (request) => /^https?:/.test(request.url()) && errors.push(request.url()));
await page.setViewport({ width: Number(width), height: 900 });
await page.goto(pathToFileURL(file).href, { waitUntil: "load" });
await page.waitForFunction(
  () => [...document.querySelectorAll(".chart")].every((chart) => chart.querySelector(".main-svg")),
  { timeout: 60000 },
);
const shown = await page.evaluate(() => ({
  width: document.documentElement.scrollWidth,
  charts: Object.fromEntries(
    [...document.querySelectorAll(".chart")].map((chart) => [chart.id, chart.textContent]),
  ),
  text: document.body.innerText,
}));
console.log(JSON.stringify({ ...shown, errors }));
await browser.close();
