//! A node that the tests play: it keeps values as an engine does, and does wrong what a test wants.

use std::collections::HashMap;
use std::io::{BufReader, Write as _};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The words of a command.
pub type Words = Vec<Vec<u8>>;

/// The way in which a node does a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// As an engine does.
    Serve,
    /// Not at all; it answers this line.
    Say(&'static str),
    /// Not at all; the connection is cut.
    Cut,
    /// The answer is cut after so many bytes, and so is the connection.
    CutAfter(usize),
    /// So many bytes of the answer are sent, and the rest after this time.
    Stall(usize, Duration),
    /// So many bytes of the answer are sent, and the rest once [`Fake::holds`] is false.
    Hold(usize),
    /// The answer is this value, whatever it should be.
    Answer(Vec<u8>),
    /// The answer is these bytes, whatever they mean.
    Send(Vec<u8>),
}

/// Decides how a command is done. It gets the values too.
pub type Plan = Box<dyn FnMut(&Words, &HashMap<Vec<u8>, Vec<u8>>) -> Act + Send>;

/// The node's values, and what it says of itself.
pub struct State {
    pub values: HashMap<Vec<u8>, Vec<u8>>,
    /// The run ID.
    pub run: String,
    /// Answers to `CONFIG GET`.
    pub settings: HashMap<&'static str, String>,
    pub plan: Plan,
    /// Number of connections so far.
    connections: i64,
    open: HashMap<i64, TcpStream>,
}

pub struct Fake {
    pub port: u16,
    state: Arc<Mutex<State>>,
    pub holds: Arc<AtomicBool>,
}

impl Fake {
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let settings = [("maxmemory", "0"), ("maxmemory-policy", "noeviction")];
        let state = Arc::new(Mutex::new(State {
            values: HashMap::new(),
            run: format!("{port}-0"),
            settings: settings.map(|(key, value)| (key, value.to_owned())).into(),
            plan: Box::new(|_, _| Act::Serve),
            connections: 0,
            open: HashMap::new(),
        }));
        let holds = Arc::new(AtomicBool::new(true));
        let fake = Fake { port, state: Arc::clone(&state), holds: Arc::clone(&holds) };
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), state, holds) = (client, Arc::clone(&state), Arc::clone(&holds)) else {
                    return;
                };
                client.set_nodelay(true).unwrap();
                std::thread::spawn(move || {
                    let id = {
                        let mut state = lock(&state);
                        state.connections += 1;
                        let id = state.connections;
                        state.open.insert(id, client.try_clone().unwrap());
                        id
                    };
                    serve(&client, id, &state, &holds);
                    let _ = client.shutdown(Shutdown::Both);
                    lock(&state).open.remove(&id);
                });
            }
        });
        fake
    }

    pub fn name(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Has the node do commands as `plan` says.
    pub fn plan(&self, plan: impl FnMut(&Words, &HashMap<Vec<u8>, Vec<u8>>) -> Act + Send + 'static) {
        self.state().plan = Box::new(plan);
    }

    /// Ends the node's process, and starts another one with these values.
    pub fn replace(&self, values: HashMap<Vec<u8>, Vec<u8>>) {
        let mut state = self.state();
        let (port, connections) = (self.port, state.connections);
        (state.run, state.values) = (format!("{port}-{connections}-again"), values);
        state.open.drain().for_each(|(_, client)| _ = client.shutdown(Shutdown::Both));
    }

    /// Whether it has a value for this key, of one store.
    pub fn has(&self, key: &str) -> bool {
        self.state().values.contains_key(key.as_bytes())
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn words(from: &mut impl std::io::BufRead) -> Option<Words> {
    let number = |from: &mut dyn std::io::BufRead| {
        let mut line = String::new();
        from.read_line(&mut line).ok()?;
        line.get(1..)?.trim().parse::<usize>().ok()
    };
    let count = number(from)?;
    let mut words = Vec::new();
    for _ in 0..count {
        let mut word = vec![0; number(from)? + 2];
        from.read_exact(&mut word).ok()?;
        word.truncate(word.len() - 2);
        words.push(word);
    }
    Some(words)
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

fn serve(client: &TcpStream, id: i64, state: &Mutex<State>, holds: &AtomicBool) {
    let mut reader = BufReader::with_capacity(1 << 19, client);
    while let Some(words) = words(&mut reader) {
        let (act, answer) = {
            let mut state = lock(state);
            // Whether another process has taken the place of this connection's one.
            if !state.open.contains_key(&id) {
                return;
            }
            let State { plan, values, .. } = &mut *state;
            let act = plan(&words, values);
            let is_done = !matches!(act, Act::Say(_) | Act::Cut);
            (act, if is_done { answer(&words, id, &mut state) } else { Vec::new() })
        };
        let mut client = client;
        let sent = match act {
            Act::Serve => client.write_all(&answer),
            Act::Say(line) => client.write_all(format!("-{line}\r\n").as_bytes()),
            Act::Answer(value) => client.write_all(&bulk(&value)),
            Act::Send(bytes) => client.write_all(&bytes),
            Act::Cut => return,
            Act::CutAfter(count) => {
                let _ = client.write_all(&answer[..count.min(answer.len())]);
                return;
            }
            Act::Stall(count, time) => {
                let (now, later) = answer.split_at(count.min(answer.len()));
                let sent = client.write_all(now);
                std::thread::sleep(time);
                sent.and_then(|()| client.write_all(later))
            }
            Act::Hold(count) => {
                let (now, later) = answer.split_at(count.min(answer.len()));
                let sent = client.write_all(now);
                while holds.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                sent.and_then(|()| client.write_all(later))
            }
        };
        if sent.is_err() {
            return;
        }
    }
}

fn answer(words: &Words, id: i64, state: &mut State) -> Vec<u8> {
    let word = |at: usize| {
        words.get(at).map(|word| String::from_utf8_lossy(word).to_ascii_uppercase()).unwrap_or_default()
    };
    match word(0).as_str() {
        "GET" => state.values.get(&words[1]).map_or(b"$-1\r\n".to_vec(), |value| bulk(value)),
        "SET" => {
            state.values.insert(words[1].clone(), words[2].clone());
            b"+OK\r\n".to_vec()
        }
        "UNLINK" => {
            let gone = words[1..].iter().filter(|key| state.values.remove(*key).is_some()).count();
            format!(":{gone}\r\n").into_bytes()
        }
        "PING" => b"+PONG\r\n".to_vec(),
        "CLIENT" if word(1) == "ID" => format!(":{id}\r\n").into_bytes(),
        "CLIENT" if word(1) == "KILL" => {
            let other = state.open.remove(&word(3).parse().unwrap());
            let count = i32::from(other.is_some());
            other.into_iter().for_each(|client| _ = client.shutdown(Shutdown::Both));
            format!(":{count}\r\n").into_bytes()
        }
        "INFO" => bulk(format!("run_id:{}\r\ncluster_enabled:0\r\n", state.run).as_bytes()),
        "CONFIG" => match state.settings.get(word(2).to_ascii_lowercase().as_str()) {
            Some(value) => [b"*2\r\n".to_vec(), bulk(&words[2]), bulk(value.as_bytes())].concat(),
            None => b"*0\r\n".to_vec(),
        },
        _ => b"+OK\r\n".to_vec(),
    }
}
