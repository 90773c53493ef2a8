// Looks a name up and connects at once to port 443 of what it was told.
//
//   node lookup.js lookup NAME       dns.lookup: the C library's getaddrinfo, in a thread
//   node lookup.js resolve NAME      dns.resolve4 and dns.resolve6: Node's own c-ares
//
// What it prints is drawn in ../test_clients.py.
"use strict";
const dns = require("dns").promises;
const net = require("net");

const ways = {
  lookup: async (name) => (await dns.lookup(name, { all: true })).map((each) => each.address),
  // A name has one family or both: what is missing is no failure of the other.
  resolve: async (name) => {
    const both = await Promise.allSettled([dns.resolve4(name), dns.resolve6(name)]);
    const found = both.flatMap((each) => each.value ?? []);
    if (!found.length) throw both[0].reason;
    return found;
  },
};

const connect = (address) =>
  new Promise((done) => {
    const socket = net.connect({ host: address, port: 443, timeout: 3000 });
    const end = (outcome) => {
      socket.destroy();
      done(outcome);
    };
    socket.on("connect", () => end("connected"));
    socket.on("timeout", () => end("timed out"));
    socket.on("error", (error) => end(error.code));
  });

const main = async (way, name) => {
  const begun = performance.now();
  const took = () => (performance.now() - begun).toFixed(1);
  let addresses, lookedUp;
  try {
    addresses = await ways[way](name);
    lookedUp = took();
  } catch (error) {
    console.log(`failed ${took()} ${error.code}`);
    return;
  }
  for (const isFamily of [net.isIPv4, net.isIPv6]) {
    const address = addresses.find(isFamily);
    if (address === undefined) continue;
    const connecting = performance.now();
    const outcome = await connect(address);
    console.log(`connection ${(performance.now() - connecting).toFixed(1)} ${address} ${outcome}`);
  }
  console.log(`addresses ${lookedUp} ${addresses.join(" ")}`);
};

main(...process.argv.slice(2));
